"""Settings of services in deployment files."""

import dataclasses
import os
from typing import Any
from unittest.mock import patch

from baton.config.roles import load
from baton.config.router import RouterConfig
from baton.config.worker import DecodeConfig, MixedConfig, PrefillConfig

CONFIGS = {
    "router": RouterConfig,
    "prefill_svc": PrefillConfig,
    "decode_svc": DecodeConfig,
    "mixed_svc": MixedConfig,
}


def configured(module: str, environment: dict[str, str]) -> Any:
    """Settings of a service, which must have a use for every variable."""
    settings: Any = CONFIGS[module]
    fields = {field.name for field in dataclasses.fields(settings)}
    foreign = {name for name in environment if name.removeprefix("BATON_").lower() not in fields}
    assert not foreign, f"{module} has no use for {foreign}"
    with patch.dict(os.environ, environment, clear=True):
        return load(settings, [])
