"""The Kubernetes manifests: each overlay renders, matches its schemas, and keeps the rules of this project."""

import json
import os
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from baton.config import parse_address, parse_bytes
from baton.config.worker import DecodeConfig
from baton.model import checkpoint
from baton.telemetry.metrics import METRIC_FAMILIES
from tests.deployment import configured
from tests.redis_server import BINARIES, Server

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
REST = ("redis-external", "ingress")
"""Components of the fleet REST, which no overlay uses."""
FLEETS = [*OVERLAYS, "REST", "DOCS"]
DOCS = (ROOT / "docs" / "deploy.md").read_text()
MODULES = {"router": "router", "prefill": "prefill_svc", "decode": "decode_svc", "mixed": "mixed_svc"}
CRDS = json.loads((ROOT / "tests" / "crds.json").read_text())
SECRETS = {
    *("baton-fleet", "baton-redis", "baton-hf", "baton-ticket-key", "baton-ticket-keys", "baton-api-keys"),
    *(f"baton-{name}-tls" for name in ("router", "prefill", "decode", "mixed", "redis", "gateway", "ingress")),
}
"""Objects that users or cert-manager create."""

Document = dict[str, Any]
KUSTOMIZE = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
pytestmark = pytest.mark.skipif(not shutil.which(KUSTOMIZE[0]), reason="neither kustomize nor kubectl is here")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Document]]:
    """The documents of an overlay, of the fleet REST, or of the fleet that docs/deploy.md shows."""

    @cache
    def render(name: str) -> list[Document]:
        if name in OVERLAYS:
            return build(KUBERNETES / "overlays" / name)
        path = tmp_path_factory.mktemp(name)
        here = os.path.relpath(KUBERNETES, path)
        text = yaml.safe_dump(
            {"resources": [f"{here}/base"], "components": [f"{here}/components/{each}" for each in REST]}
        )
        if name == "DOCS":
            (text,) = re.findall(r"^```yaml\n(apiVersion: kustomize.*?)^```", DOCS, re.DOTALL | re.MULTILINE)
            text = re.sub(
                r"https://github.com/OWNER/baton//deploy/kubernetes|\?ref=\S+", lambda m: here * (m[0][0] == "h"), text
            )
        (path / "kustomization.yaml").write_text(text)
        return build(path)

    return render


@pytest.fixture(params=FLEETS)
def documents(request: pytest.FixtureRequest, rendered: Callable[[str], list[Document]]) -> list[Document]:
    return rendered(request.param)


def build(path: Path) -> list[Document]:
    done = subprocess.run([*KUSTOMIZE, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def name_of(document: Document) -> str:
    return str(document["metadata"]["name"])


def names_of(documents: list[Document], *kinds: str) -> set[str]:
    return {name_of(document) for document in of_kind(documents, *kinds)}


def pods(documents: list[Document]) -> Iterator[tuple[Document, dict[str, str], Document]]:
    """Each workload, the labels of its pods, and their specification."""
    for workload in of_kind(documents, "Deployment", "Job"):
        template = workload["spec"]["template"]
        yield workload, template["metadata"]["labels"], template["spec"]


def containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def services(documents: list[Document]) -> Iterator[tuple[str, Document, Document]]:
    """Role, pod and container of each of our services."""
    for _, labels, pod in pods(documents):
        if (role := labels["app.kubernetes.io/component"]) in MODULES:
            (container,) = pod["containers"]
            yield role, pod, container


def data_of(documents: list[Document], name: str) -> dict[str, str]:
    (found,) = (each for each in of_kind(documents, "ConfigMap") if name_of(each) == name)
    return dict(found["data"])


def environment(documents: list[Document], container: Document) -> dict[str, str]:
    """Variables of a container as the kubelet makes them; those from secrets and fields are stood in for."""
    found: dict[str, str] = {}
    expandable: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= data_of(documents, source["configMapRef"]["name"])
    for entry in container.get("env", []):
        origin = entry.get("valueFrom", {})
        if resource := origin.get("resourceFieldRef"):
            kind, _, name = resource["resource"].partition(".")
            value = container["resources"][kind][name]
        elif key := origin.get("configMapKeyRef"):
            value = data_of(documents, key["name"])[key["key"]]
        elif origin:
            value = "redis://stand-in" if entry["name"] == "BATON_REDIS" else "stand-in"
        else:
            value = expand(entry["value"], expandable)
        expandable[entry["name"]] = value
    return found | expandable


def expand(text: str, values: dict[str, str]) -> str:
    """Text with $(NAME) replaced; a name that is not defined before would stay as it is."""
    assert not (missing := set(re.findall(r"\$\((\w+)\)", text)) - values.keys()), f"{missing} in {text}"
    return re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], text)


def ours(documents: list[Document], container: Document) -> dict[str, str]:
    """Variables that services read; a CA file for Redis is left out, because it must exist."""
    values = environment(documents, container)
    return {name: value.partition("?")[0] for name, value in values.items() if name.startswith("BATON_")}


def selects(selector: Document, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(term["operator"] == "In" for term in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(term["key"]) in term["values"] for term in expressions
    )


# ------------------------------------------------------------------------------------------------- schemas


def test_every_document_matches_its_schema(documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "schema_contents", SCHEMAS)
    versions = (utils.all_versions()[0], utils.latest_version())
    for document in documents:
        check(document, versions)


SCHEMAS = cache(utils.schema_contents)


def check(document: Document, versions: tuple[str, ...]) -> None:
    kind = f"{document['apiVersion']}/{document['kind']}"
    if kind in CRDS:
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(document["spec"], CRDS[kind])
    else:
        for version in versions:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "Certificate", "PodMonitor", "GRPCRoute", "HTTPRoute"])
def test_a_misspelt_field_does_not_match(kind: str, rendered: Callable[[str], list[Document]]) -> None:
    document = of_kind(rendered("production"), kind)[0]
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        check({**document, "spec": {**document["spec"], "unknown": 1}}, (utils.latest_version(),))


def test_every_component_is_rendered_and_explained() -> None:
    used = {*REST}
    for path in [
        *KUBERNETES.glob("overlays/**/kustomization.yaml"),
        *KUBERNETES.glob("components/*/kustomization.yaml"),
    ]:
        used |= {Path(each).name for each in yaml.safe_load(path.read_text()).get("components", [])}
    assert used == set(COMPONENTS)
    for name in (*OVERLAYS, *COMPONENTS, *SECRETS):
        assert re.search(rf"[`/ ]{name}[`\n /]", DOCS), f"docs/deploy.md does not explain {name}"


def test_every_file_is_used() -> None:
    for path in KUBERNETES.glob("**/kustomization.yaml"):
        document = yaml.safe_load(path.read_text())
        named = {*document.get("resources", []), *document.get("configurations", [])}
        named |= {patch["path"] for patch in document.get("patches", [])}
        named |= {name for each in document.get("configMapGenerator", []) for name in each.get("files", [])}
        files = {file.name for file in path.parent.iterdir() if file.is_file()} - {"kustomization.yaml"}
        assert files == {name for name in named if Path(name).suffix}, path


def test_the_snippets_of_the_docs_fit(tmp_path: Path) -> None:
    """The label and prefix of a fleet, the patch that names the routers' hosts, and that of decode workers of ranks."""
    blocks = re.findall(r"^```yaml\n((?:resources|patches):.*?)^```", DOCS, re.DOTALL | re.MULTILINE)
    fleet, *patches = sorted(blocks, key=lambda block: block.startswith("patches"))
    patch = "patches:\n" + "".join(block.removeprefix("patches:\n") for block in patches)
    here = os.path.relpath(KUBERNETES / "overlays", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(fleet.replace("..", here) + patch)
    documents = build(tmp_path)
    assert names_of(documents, "Certificate") >= {"chat-baton-router"}
    (router,) = (each for each in of_kind(documents, "Certificate") if name_of(each) == "chat-baton-router")
    assert router["spec"]["dnsNames"] == ["router.baton", "localhost", "chat-baton-router", "baton-router.baton.svc"]
    (decode,) = (each for each in of_kind(documents, "Deployment") if name_of(each) == "chat-baton-decode")
    environment = {each["name"]: each for each in decode["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["BATON_TENSOR_PARALLEL"]["value"] == "2"
    assert environment["BATON_THREADS"] == {"name": "BATON_THREADS", "value": "4"}


# ------------------------------------------------------------------------------------------------- pods


def test_probes_follow_the_process_and_not_a_fixed_time(documents: list[Document]) -> None:
    for _, _, container in services(documents):
        paths = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
        # Without mutual TLS, which a probe can't do.
        assert {each["port"] for each in paths.values()} == {"ops"}
        assert {kind: each["path"] for kind, each in paths.items()} == {
            "startup": "/live",
            "liveness": "/live",
            "readiness": "/ready",
        }
        startup, liveness = container["startupProbe"], container["livenessProbe"]
        # Only the interpreter has to start; a model may load for as long as it makes progress.
        assert 30 <= startup["periodSeconds"] * startup["failureThreshold"] <= 60
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30
        assert min(container[f"{kind}Probe"]["timeoutSeconds"] for kind in paths) >= 5
    for workload in of_kind(documents, "Deployment"):
        for container in workload["spec"]["template"]["spec"]["containers"]:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
        if workload["metadata"]["labels"]["app.kubernetes.io/component"] in MODULES:
            assert workload["spec"]["progressDeadlineSeconds"] == 3600


def test_every_container_has_requests_and_a_memory_limit(documents: list[Document]) -> None:
    for _, _, pod in pods(documents):
        for container in containers(pod):
            requests, limits = (container["resources"][kind] for kind in ("requests", "limits"))
            assert {"cpu", "memory"} <= requests.keys()
            assert size(requests["memory"]) <= size(limits["memory"])
        for container in pod.get("initContainers", []):
            assert container["resources"]["requests"] == container["resources"]["limits"], "no obstacle to Guaranteed"


def size(text: str) -> int:
    return parse_bytes(text + "b")


def test_pods_may_do_as_little_as_possible(documents: list[Document]) -> None:
    for _, _, pod in pods(documents):
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0 < security["fsGroup"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            volumes = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        for volume in pod["volumes"]:
            if mode := volume.get("secret", {}).get("defaultMode"):
                assert mode == 0o440


@pytest.mark.parametrize("fleet", [name for name in FLEETS if name != "cpu-pinned"])
def test_only_pods_that_share_memory_or_disks_of_a_node_see_its_files(
    fleet: str, rendered: Callable[[str], list[Document]]
) -> None:
    assert not any("hostPath" in volume for _, _, pod in pods(rendered(fleet)) for volume in pod["volumes"])


def test_a_drain_ends_within_the_grace_period(documents: list[Document]) -> None:
    for role, pod, container in services(documents):
        config = configured(MODULES[role], ours(documents, container))
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert hook[0] == "sleep"
        assert config.drain_s >= 60
        assert config.drain_s + int(hook[1]) + 20 <= pod["terminationGracePeriodSeconds"]
        if role == "router":
            # Proxies take some seconds to learn that a router ends, and gRPC adds a tenth to the age.
            assert int(hook[1]) >= 1.1 * config.connection_age_s + 10 > 10
        else:
            # Workers tell routers themselves.
            assert int(hook[1]) == 0


def test_services_understand_their_environment_and_listen_at_their_ports(documents: list[Document]) -> None:
    seen = set()
    for role, _, container in services(documents):
        seen.add(role)
        assert container["command"] == ["python3", "-m", MODULES[role]]
        config = configured(MODULES[role], ours(documents, container))
        listeners = ("grpc", "http", "ops") if role == "router" else ("control", "kv", "ops")
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {name: parse_address(getattr(config, name))[1] for name in listeners}
        exposed = re.search(r"^EXPOSE (.*)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
        assert exposed is not None
        assert {str(port) for port in ports.values()} <= set(exposed[1].split())
        assert config.fleet_secret
        if role != "router":
            assert config.threads == int(container["resources"]["requests"]["cpu"]) > 0
    assert seen == MODULES.keys()


def test_fleets_are_secure_or_say_that_they_are_not(documents: list[Document]) -> None:
    for role, pod, container in services(documents):
        config = configured(MODULES[role], ours(documents, container))
        files = [
            "tls_cert",
            "tls_key",
            "tls_ca",
            *(("ticket_key", "api_keys") if role == "router" else ("ticket_keys",)),
        ]
        found = {name: getattr(config, name) for name in files}
        assert config.insecure is not any(found.values())
        if not config.insecure:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for name, path in found.items():
                assert "secret" in volumes[mounts[str(Path(path).parent)]], f"{role} has no {name}"


# ------------------------------------------------------------------------------------------------- references


def test_all_named_objects_exist(documents: list[Document]) -> None:
    prefix = "(chat-|code-|)"
    secrets = re.compile(prefix + "(" + "|".join(sorted(SECRETS)) + ")")
    for workload, _, pod in pods(documents):
        entries = [entry.get("valueFrom", {}) for each in containers(pod) for entry in each.get("env", [])]
        used = [entry["secretKeyRef"]["name"] for entry in entries if "secretKeyRef" in entry]
        used += [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
        assert all(secrets.fullmatch(name) for name in used), used
        maps = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
        assert set(maps) <= names_of(documents, "ConfigMap")
        claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
        assert set(claims) <= names_of(documents, "PersistentVolumeClaim")
        if name := pod.get("priorityClassName"):
            assert name in names_of(documents, "PriorityClass")
        if workload["kind"] == "Deployment":
            assert (
                workload["spec"]["selector"]["matchLabels"].items()
                <= workload["spec"]["template"]["metadata"]["labels"].items()
            )


def test_routers_and_workers_find_each_other(documents: list[Document]) -> None:
    found = {name_of(each): each["spec"] for each in of_kind(documents, "Service")}
    for role, _, container in services(documents):
        values = environment(documents, container)
        targets = ("BATON_PREFILL", "BATON_DECODE", "BATON_MIXED") if role == "router" else ()
        for target in map(values.__getitem__, targets):
            host, port = parse_address(target.removeprefix("dns:///"))
            # Routers must see each worker.
            assert found[host]["clusterIP"] == "None"
            assert port in {each["port"] for each in found[host]["ports"] if each["name"] == "control"}
        if role != "router" and values["BATON_REDIS"] != "redis://stand-in":
            host, port = parse_address(re.sub(r"^rediss?://(.*@)?|\?.*", "", values["BATON_REDIS"]))
            assert port in {each["port"] for each in found[host]["ports"]}
    for service in found.values():
        for each in service["ports"]:
            (pod,) = (pod for _, labels, pod in pods(documents) if service["selector"].items() <= labels.items())
            assert each["targetPort"] in ports_of([pod])


def test_selectors_select(documents: list[Document]) -> None:
    deployments = [each for each in pods(documents) if each[0]["kind"] == "Deployment"]

    def selected(selector: Document) -> list[Document]:
        return [pod for _, labels, pod in pods(documents) if selects(selector, labels)]

    for budget in of_kind(documents, "PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1
        assert len(selected(budget["spec"]["selector"])) == 1
    for _, labels, pod in deployments:
        role = labels["app.kubernetes.io/component"]
        budgets = of_kind(documents, "PodDisruptionBudget")
        assert any(selects(each["spec"]["selector"], labels) for each in budgets) is (role in MODULES)
        for constraint in pod.get("topologySpreadConstraints", []):
            assert selected(constraint["labelSelector"]) == [pod]
        assert ("topologySpreadConstraints" in pod) is (role in MODULES)
    for policy in of_kind(documents, "NetworkPolicy"):
        here = selected(policy["spec"]["podSelector"])
        download = policy["metadata"]["name"].endswith("download")
        assert here or download
        for rule in policy["spec"].get("ingress", []):
            peers = [selected(peer["podSelector"]) for peer in rule.get("from", [])]
            assert all(peers)
            assert named_ports(rule) <= {
                port["name"] for pod in here for each in pod["containers"] for port in each["ports"]
            }
        for rule in policy["spec"].get("egress", []):
            there = [pod for peer in rule.get("to", []) for pod in selected(peer["podSelector"])]
            assert named_ports(rule) <= {
                port["name"] for pod in there for each in pod["containers"] for port in each["ports"]
            }
    for monitor in of_kind(documents, "PodMonitor"):
        assert len(selected(monitor["spec"]["selector"])) == len(MODULES)


def ports_of(pods: list[Document]) -> set[str]:
    return {port["name"] for pod in pods for container in pod["containers"] for port in container.get("ports", [])}


def test_clients_reach_both_apis(documents: list[Document]) -> None:
    """Policies let clients reach gRPC and HTTP, and each has a host name of its own outside the cluster."""
    for router in (each for _, each, _ in pods(documents) if each["app.kubernetes.io/component"] == "router"):
        policies = [each["spec"] for each in of_kind(documents, "NetworkPolicy")]
        rules = [rule for each in policies if selects(each["podSelector"], router) for rule in each.get("ingress", ())]
        assert {port for rule in rules if not rule.get("from") for port in named_ports(rule)} == {"grpc", "http", "ops"}
    found = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "Service")}
    hosts = {}
    for route in of_kind(documents, "GRPCRoute", "HTTPRoute"):
        (parent,) = route["spec"]["parentRefs"]
        (gateway,) = (each for each in of_kind(documents, "Gateway") if name_of(each) == parent["name"])
        (listener,) = (each for each in gateway["spec"]["listeners"] if each["name"] == parent["sectionName"])
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        (port,) = (each["name"] for each in found[backend["name"]]["ports"] if each["port"] == backend["port"])
        assert route["spec"]["hostnames"] == [listener["hostname"]]
        hosts[backend["name"], port] = listener["hostname"]
    for policy in of_kind(documents, "BackendTLSPolicy"):
        assert {each["sectionName"] for each in policy["spec"]["targetRefs"]} == {"grpc", "http"}
    for ingress in of_kind(documents, "Ingress"):
        (rule,) = ingress["spec"]["rules"]
        service = rule["http"]["paths"][0]["backend"]["service"]
        port = service["port"]["name"]
        protocol = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/backend-protocol"]
        assert protocol == port.upper()
        assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"]]
        hosts[service["name"], port] = rule["host"]
    # Two fleets may share a name until it is patched.
    for name in {name for name, _ in hosts}:
        assert hosts[name, "grpc"] != hosts[name, "http"]


def named_ports(rule: Document) -> set[str]:
    return {each["port"] for each in rule["ports"] if isinstance(each["port"], str)}


def test_every_pod_is_behind_a_policy(documents: list[Document]) -> None:
    policies = of_kind(documents, "NetworkPolicy")
    for workload, labels, _ in pods(documents):
        kinds = {
            kind
            for each in policies
            if selects(each["spec"]["podSelector"], labels)
            for kind in each["spec"]["policyTypes"]
        }
        assert "Ingress" in kinds or workload["kind"] == "Job"
        # The component egress limits all of them.
        assert "Egress" in kinds or not any("egress" in name_of(each) for each in policies)


def labels_of_targets(documents: list[Document]) -> Iterator[str]:
    """Labels that PodMonitors add to all metrics of a pod."""
    for monitor in of_kind(documents, "PodMonitor"):
        yield from monitor["spec"]["podTargetLabels"]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            yield from (rule["targetLabel"] for rule in endpoint["relabelings"])


@pytest.mark.parametrize("model", ["model-pvc", "model-node-cache"])
def test_what_downloads_may_reach_the_hub(model: str, tmp_path: Path) -> None:
    here = os.path.relpath(KUBERNETES, tmp_path)
    parts = [f"{here}/components/{name}" for name in (model, "egress")]
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": [f"{here}/base"], "components": parts, "namePrefix": "chat-"})
    )
    documents = build(tmp_path)
    loaders = [labels for _, labels, pod in pods(documents) if downloads(pod)]
    assert len(loaders) == {"model-pvc": 1, "model-node-cache": 4}[model]
    for each in loaders:
        assert 443 in {
            port["port"]
            for policy in of_kind(documents, "NetworkPolicy")
            if selects(policy["spec"]["podSelector"], each)
            for rule in policy["spec"].get("egress", ())
            for port in rule["ports"]
        }


def downloads(pod: Document) -> bool:
    return any("/scripts/download.sh" in container.get("command", ()) for container in containers(pod))


def test_autoscalers_have_the_replicas_to_themselves(documents: list[Document]) -> None:
    replicas = {name_of(each): each["spec"].get("replicas") for each in of_kind(documents, "Deployment")}
    for scaler in of_kind(documents, "HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        # At 0 replicas an autoscaler rests.
        assert replicas[name := spec["scaleTargetRef"]["name"]] in ((0, None) if name.endswith("mixed") else (None,))
        # A rollout without room for a new pod leaves one.
        assert 2 <= spec["minReplicas"] < spec["maxReplicas"]
        external = [metric["external"] for metric in spec["metrics"] if metric["type"] == "External"]
        assert {each["metric"]["selector"]["matchLabels"]["fleet"] for each in external} <= {
            scaler["metadata"]["labels"]["fleet"]
        }
        for each in external:
            family = METRIC_FAMILIES[each["metric"]["name"]]
            assert family.kind == "gauge"
            assert each["metric"]["selector"]["matchLabels"].keys() <= {
                *family.all_labels,
                *labels_of_targets(documents),
            }
            if each["metric"]["name"] == "baton_requests_running" and name_of(scaler).endswith(("decode", "mixed")):
                assert int(each["target"]["averageValue"]) == DecodeConfig().slots * 3 // 4


@pytest.mark.parametrize("others", [[], ["autoscaling", "monitoring"]])
def test_mixed_workers_take_the_place_of_the_others(others: list[str], tmp_path: Path) -> None:
    here = os.path.relpath(KUBERNETES, tmp_path)
    parts = [f"{here}/components/{name}" for name in (*others, "mixed")]
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": [f"{here}/base"], "components": parts, "namePrefix": "chat-"})
    )
    documents = build(tmp_path)
    replicas = {
        name_of(each).removeprefix("chat-baton-"): each["spec"].get("replicas") for each in deployments(documents)
    }
    assert replicas == {"router": None if others else 2, "prefill": 0, "decode": 0, "mixed": None}
    scaled = {each["spec"]["scaleTargetRef"]["name"] for each in of_kind(documents, "HorizontalPodAutoscaler")}
    assert ("chat-baton-mixed" in scaled) is bool(others)


@pytest.mark.parametrize("fleet", [name for name in FLEETS if name != "mixed"])
def test_other_fleets_have_no_mixed_workers(fleet: str, rendered: Callable[[str], list[Document]]) -> None:
    for each in deployments(rendered(fleet)):
        assert (each["spec"].get("replicas") == 0) is name_of(each).endswith("mixed")


def deployments(documents: list[Document]) -> list[Document]:
    return of_kind(documents, "Deployment")


def test_a_rollout_works_where_every_device_is_taken(rendered: Callable[[str], list[Document]]) -> None:
    for name in ("gpu", "production", "cpu-pinned"):
        for workload, labels, pod in pods(rendered(name)):
            if labels["app.kubernetes.io/component"] in ("prefill", "decode", "mixed"):
                assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
                resources = pod["containers"][0]["resources"]
                if name == "cpu-pinned":
                    assert resources["requests"] == resources["limits"]
                    assert resources["requests"]["cpu"].isdecimal()
                else:
                    assert resources["limits"]["nvidia.com/gpu"] == 1
                    assert pod["nodeSelector"]
                    assert {each["key"] for each in pod["tolerations"]} == {"nvidia.com/gpu"}
                    assert pod["containers"][0]["image"].startswith("localhost/baton-cuda:")


def test_models_come_from_one_folder(rendered: Callable[[str], list[Document]]) -> None:
    for name in ("gpu", "cpu-pinned"):
        documents = rendered(name)
        folders = set()
        for _, labels, pod in pods(documents):
            for container in containers(pod):
                if labels["app.kubernetes.io/component"] != "redis":
                    folders.add(environment(documents, container)["BATON_MODEL"])
        assert folders == {"/models/Qwen/Qwen2.5-0.5B-Instruct/main"}
    script = (KUBERNETES / "components" / "model" / "download.sh").read_text()
    assert re.findall(r'--include "([^"]+)"', script) == checkpoint._HUB_FILES


DOWNLOAD = ["sh", str(KUBERNETES / "components" / "model" / "download.sh")]


def download_environment(folder: Path, binaries: Path) -> dict[str, str]:
    path = f"{binaries}:{os.environ['PATH']}"
    return {"HF_MODEL": "org/model", "HF_REVISION": "main", "BATON_MODEL": str(folder), "PATH": path}


def test_a_download_ends_at_once_when_its_pod_ends(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text(f"#!/bin/sh\necho > {tmp_path}/begun\nexec sleep 60\n")
    (tmp_path / "hf").chmod(0o755)
    values = download_environment(tmp_path / "model" / "main", tmp_path)
    with subprocess.Popen(DOWNLOAD, env=values, stdout=subprocess.PIPE) as script:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        script.terminate()
        # The pipe ends when the download has ended too.
        script.communicate(timeout=30)
    assert script.returncode == 143


def test_a_model_is_downloaded_once_and_whole(tmp_path: Path) -> None:
    folder, binaries = tmp_path / "org" / "model" / "main", tmp_path / "bin"
    binaries.mkdir()
    (binaries / "hf").write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f"[ -e {tmp_path}/works ] || exit 3\nmkdir -p {folder}.part && touch {folder}.part/config.json\n"
    )
    (binaries / "hf").chmod(0o755)
    values = download_environment(folder, binaries)

    def run() -> int:
        return subprocess.run(DOWNLOAD, env=values, timeout=30).returncode

    assert run() == 3
    assert not folder.exists()
    (tmp_path / "works").touch()
    assert run() == run() == 0
    assert (folder / "config.json").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[1].startswith(f"download org/model --revision main --local-dir {folder}.part ")


# ------------------------------------------------------------------------------------------------- fleets, images


def test_two_fleets_in_one_namespace_have_nothing_in_common(rendered: Callable[[str], list[Document]]) -> None:
    documents = rendered("two-fleets")
    chat, code = (
        [each for each in documents if each["metadata"]["name"].startswith(prefix)] for prefix in ("chat-", "code-")
    )
    assert len(chat) == len(code) == len(documents) / 2
    assert not texts(chat) & texts(code) & {name for each in documents for name in [name_of(each)]}
    for own, other, fleet in ((chat, code, "chat"), (code, chat, "code")):
        strange = [labels for _, labels, _ in pods(other)]
        for selector in selectors(own):
            assert not any(selects(selector, labels) for labels in strange), selector
            assert any(selects(selector, labels) for _, labels, _ in pods(own))
        names = {text for text in texts(own) if re.match(r"baton-", text)}
        assert not names, f"{fleet} shares {names}"


def texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*(texts(each) for key, each in value.items() if key not in ("labels", "matchLabels")))
    if isinstance(value, list):
        return set().union(*map(texts, value))
    return {value} if isinstance(value, str) else set()


def selectors(value: Any) -> Iterator[Document]:
    """Every selector of pods in the documents."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("podSelector", "labelSelector") or (key == "selector" and "matchLabels" in each):
                if "app.kubernetes.io/name" in each.get("matchLabels", {}):
                    yield each
                else:
                    assert "fleet" in each["matchLabels"], each
            elif key == "selector":
                yield {"matchLabels": each}
            else:
                yield from selectors(each)
    elif isinstance(value, list):
        for each in value:
            yield from selectors(each)


def test_images_are_ours_or_fully_named(documents: list[Document]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for _, _, pod in pods(documents):
        for container in containers(pod):
            registry, _, name = container["image"].partition("/")
            assert registry in ("localhost", "docker.io", "registry.example.org")
            if registry == "localhost":
                assert name in (f"baton:{version}", f"baton-cuda:{version}")
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    assert {compose[role]["image"] for role in MODULES} == {f"localhost/baton:{version}"}


# ------------------------------------------------------------------------------------------------- Redis


def redis_of(documents: list[Document]) -> Document:
    (found,) = (pod for _, labels, pod in pods(documents) if labels["app.kubernetes.io/component"] == "redis")
    (container,) = found["containers"]
    assert all(volume.keys() & {"emptyDir", "secret"} for volume in found["volumes"])
    return dict(container)


@pytest.mark.parametrize("kind", BINARIES)
def test_redis_evicts_within_its_memory_and_keeps_nothing(
    kind: str, rendered: Callable[[str], list[Document]], tmp_path: Path
) -> None:
    documents = rendered("cpu")
    container = redis_of(documents)
    resources = container["resources"]
    values = {"REDIS_MEMORY": str(size(resources["requests"]["memory"]))}
    server = Server(kind, tmp_path, *(expand(flag, values) for flag in container["args"]))
    try:
        server.start()
        with server.client() as client:
            config = client.config_get("*")
    finally:
        server.kill()
    assert (config["maxmemory-policy"], config["save"], config["appendonly"]) == ("allkeys-lru", "", "no")
    assert 0 < int(config["maxmemory"]) <= 0.8 * size(resources["limits"]["memory"])
    assert config["lazyfree-lazy-eviction"] == config["lazyfree-lazy-expire"] == "yes"


def test_the_secure_redis_starts_with_the_user_of_the_docs(
    rendered: Callable[[str], list[Document]], tmp_path: Path
) -> None:
    """Without TLS, which the server of the tests does not have."""
    script = redis_of(rendered("secure"))["command"][2]
    assert "--port 0 --tls-port 6379" in script
    script = re.sub(r"--port 0 --tls-port 6379|--tls-\S+ \S+", "", script)
    binary = tmp_path / "redis-server"
    binary.write_text(f'#!/bin/sh\nprintf "%s " "$@" > {tmp_path}/flags\ncat > {tmp_path}/users\n')
    binary.chmod(0o755)
    values = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": "word"}
    subprocess.run(["sh", "-c", script, "redis", "--save", ""], env=values, check=True, timeout=30)
    assert (tmp_path / "flags").read_text().split() == ["--save", "-"]
    users = (tmp_path / "users").read_text().splitlines()
    documented = re.search(r"^ACL SETUSER (.*)$", DOCS, re.MULTILINE)
    assert documented is not None
    assert users[0] == "user default off"
    assert users[1].split() == ["user", *documented[1].replace("PASSWORD", "word").split()]
    server = Server("valkey", tmp_path, *(text for line in users for text in ("--user", *line.split()[1:])))
    try:
        server.start()
    finally:
        server.kill()
