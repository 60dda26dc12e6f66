"""`python -m mixed_svc`: one worker of both roles, from flags and environment."""

from __future__ import annotations

from baton.config.worker import MixedConfig
from baton.engine.process import prepare
from baton.process.service import Running, main
from baton.telemetry.logs import configure


def start(config: MixedConfig) -> Running:
    """A worker that is ready to be entered."""
    configure(config.log_level, "mixed", config.worker_id, log_format=config.log_format)
    prepare(config.cpus, config.threads, config.tensor_parallel * config.pipeline_parallel)
    # Imported here, so that --help and bad settings are answered before torch is imported.
    from mixed_svc.app import run

    return run(config)


if __name__ == "__main__":
    main("mixed", "mixed_svc", MixedConfig, start)
