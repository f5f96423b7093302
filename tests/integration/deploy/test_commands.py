"""Everything that the chart has a container run exists here: commands, flags, variables, settings, files."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from huggingface_hub import constants
from ray.scripts import scripts as rays

from tandem.controlplane.container_entrypoints.__main__ import main, parser
from tandem.controlplane.container_entrypoints.records import WORKER_PORT
from tandem.controlplane.resolve import check
from tandem.core.config import Anonymous, ClusterConfig
from tandem.core.config_loader import load
from tests.integration.deploy.mounting import Mounted, mounted
from tests.integration.deploy.rendering import CHART, ROOT, Container, Helm, Release


def ours(release: Release) -> list[Container]:
    return [each for each in release.containers() if each.is_ours]


def test_every_configuration_is_read_and_right(release: Release, tmp_path: Path) -> None:
    for name, text in release.config().items():
        path = tmp_path / name
        path.write_text(text)
        config = load(path, ClusterConfig)
        router = check(config)
        assert config.redis.url
        if name == "router.toml":
            assert (router.port, router.grpc_port, router.admin_port) == (8000, 8001, 8002)
            assert router.anonymous is not Anonymous.LOOPBACK, "nobody is on a pod's loopback"


def test_settings_arrive_as_they_were_given(helm: Helm, tmp_path: Path) -> None:
    release = helm.render((CHART / "ci" / "promises.yaml").read_text())
    path = tmp_path / "router.toml"
    path.write_text(release.config()["router.toml"])
    config = load(path, ClusterConfig)
    assert (config.slo["chat"].ttft_s, config.slo["batch.night"].ttft_s) == (0.5, 60)
    assert (config.budget["*"].requests_per_minute, config.budget["acme"].tokens_per_minute) == (60, 1_000_000)
    release = helm.render((CHART / "ci" / "two-classes.yaml").read_text())
    small, large = (tomllib.loads(release.config()[f"pool-{name}.toml"]) for name in ("decode-small", "decode"))
    assert small["worker"]["kv_memory_bytes"] == 17179869184
    assert large["worker"]["kv_memory_bytes"] == 34359738368
    assert (small["worker"]["kv_dtype"], large["worker"]["tp"], large["worker"]["device"]) == ("float16", 2, "cuda")


def test_traces_are_the_router_s_alone(helm: Helm, tmp_path: Path) -> None:
    values = (CHART / "ci" / "traced.yaml").read_text()
    on_ray = "backend: kuberay\nkuberay: {token: {existingSecret: ray-token}}\n"
    for text, front, file in ((values, "router", "router.toml"), (values + on_ray, "up", "up.toml")):
        release = helm.render(text)
        (tmp_path / file).write_text(release.config()[file])
        tracing = load(tmp_path / file, ClusterConfig).tracing
        assert (tracing.endpoint, tracing.sample_ratio) == ("https://collector.observability:4318", 0.1)
        for each in ours(release):
            given = {"--otlp-headers", "--otlp-ca"} & set(each.command)
            assert given == ({"--otlp-headers", "--otlp-ca"} if each.name == front else set())
        assert not [name for name, one in release.config().items() if name.startswith("pool-") and "tracing" in one]


def test_every_flag_is_taken(release: Release) -> None:
    for each in ours(release):
        assert each.command[:3] == ["python", "-m", "tandem.controlplane.container_entrypoints"]
        words = [Mounted(Path("/")).here(word) for word in each.command[3:]]
        wanted = parser().parse_args(words)
        assert wanted.part == each.name
        if wanted.part == "worker":
            assert {port["containerPort"] for port in each.spec["ports"]} == {wanted.port} == {WORKER_PORT}
        stopping = each.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        if stopping:
            drained = parser().parse_args(stopping["command"][3:])
            assert (drained.part, str(drained.folder)) == ("drain", "/run/tandem")


def test_every_file_that_a_flag_names_is_mounted(release: Release) -> None:
    for each in ours(release):
        folders = {mount["mountPath"] for mount in each.spec["volumeMounts"]}
        for path in (Path(word) for word in each.command if word.startswith("/")):
            assert {str(path), *map(str, path.parents)} & folders, path
        sources = next(v for v in each.pod["volumes"] if v["name"] == "secrets")["projected"]["sources"]
        there = {item["path"] for source in sources for item in source["secret"]["items"]}
        named = {Path(word).name for word in each.command if word.startswith("/etc/tandem/secrets/")}
        assert named <= there
        assert there - named <= {"hub-token", "redis-ca.crt"}, "no more secrets than it reads"


def test_every_variable_is_one_that_something_reads(release: Release) -> None:
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
    hub = {name for name in ("HF_HOME", "HF_TOKEN_PATH") if hasattr(constants, name)}
    assert {"TANDEM_NATIVE", "TANDEM_KERNELS", "TANDEM_CPU_LEVEL"} <= documented
    assert hub == {"HF_HOME", "HF_TOKEN_PATH"}
    for each in ours(release):
        for variable in (found["name"] for found in each.spec["env"]):
            is_expanded = any(f"$({variable})" in word for word in each.command)
            assert is_expanded or variable in {"HOME", *hub, *documented} or variable.startswith("NCCL_"), variable


_SAID = ["minimal", "two-classes", "hub", "open", "external-redis", "controller", "ray", "traced"]


@pytest.mark.parametrize("values", _SAID)
def test_every_command_says_that_its_configuration_is_right(values: str, helm: Helm, tmp_path: Path) -> None:
    release = helm.render((CHART / "ci" / f"{values}.yaml").read_text())
    place = mounted(tmp_path, release)
    for each in ours(release):
        done = run([*place.command(each.command), "--check-config"])
        assert (done.returncode, done.stderr) == (0, ""), each.label
        assert f"is right ({each.name})" in done.stdout
    assert list((tmp_path / "run/tandem").iterdir()) == [], "it only looks"


def test_every_command_is_right_with_every_value_file(
    release: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others of the value files, without a process for each."""
    place = mounted(tmp_path, release)
    for each in ours(release):
        assert main([*place.command(each.command)[3:], "--check-config"]) == 0, each.label
        assert capsys.readouterr() == (f"{place.here(each.command[5])} is right ({each.name})\n", "")


@pytest.mark.parametrize("values", ["ray", "ray-gpu"])
def test_rays_own_containers_are_given_what_ray_takes(values: str, helm: Helm) -> None:
    """KubeRay makes flags of `ray start` of the parameters; the probes are commands of `ray`, too."""
    taken = {flag for option in rays.start.params for flag in option.opts}
    asked = {flag for option in rays.cli.commands["health-check"].params for flag in option.opts}
    release = helm.render((CHART / "ci" / f"{values}.yaml").read_text())
    for each in (each for each in release.containers() if each.owner["kind"] == "RayGroup" and not each.is_ours):
        assert "command" not in each.spec, "KubeRay gives it one"
        given = each.owner["spec"]["rayStartParams"]
        assert {f"--{name}" for name in given} <= taken
        for probe in (each.spec[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")):
            if "tcpSocket" in probe:
                assert str(probe["tcpSocket"]["port"]) == given["node-manager-port"]
            else:
                program, command, *flags = probe["exec"]["command"]
                assert (program, command) == ("ray", "health-check")
                assert {flag for flag in flags if flag.startswith("--")} <= asked


def test_a_wrong_configuration_ends_with_2_and_one_line(helm: Helm, tmp_path: Path) -> None:
    release = helm.render((CHART / "ci" / "controller.yaml").read_text())
    place = mounted(tmp_path, release)
    config = tmp_path / "etc/tandem/config"
    for path in config.iterdir():
        path.write_text(path.read_text().replace("[worker]", "[worker]\nchunk_tokenz = 3"))
    for each in ours(release):
        done = run([*place.command(each.command), "--check-config"])
        assert done.returncode == 2
        assert re.fullmatch(r"tandem pod: unknown key 'chunk_tokenz' in \[worker\] of .*\n", done.stderr)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("cluster-secret", "cluster secret is too short"), ("admin-key", "admin-key is too short"),
        ("redis-password", "redis-password is empty"),
    ],
)  # fmt: skip
def test_a_secret_that_is_none_is_named(broken: str, says: str, helm: Helm, tmp_path: Path) -> None:
    release = helm.render((CHART / "ci" / "minimal.yaml").read_text())
    place = mounted(tmp_path, release)
    (tmp_path / "etc/tandem/secrets" / broken).write_text("\n")
    [router] = [each for each in ours(release) if each.component == "router"]
    done = run([*place.command(router.command), "--check-config"])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


def test_a_controller_knows_its_pools_and_whose_scale_is_not_its_own(helm: Helm) -> None:
    release = helm.render((CHART / "ci" / "autoscaled.yaml").read_text())
    [controller] = [each for each in ours(release) if each.component == "controller"]
    wanted = parser().parse_args([Mounted(Path("/")).here(word) for word in controller.command[3:]])
    assert dict(wanted.pools) == {"prefill": "prefill", "decode": "decode", "spare": "mixed"}
    assert sorted(wanted.autoscaled) == ["decode", "prefill"]
    names = {found["metadata"]["name"] for found in release.of("Deployment")}
    assert names >= {f"{wanted.deployments}-{pool}" for pool, _ in wanted.pools}
    labels = dict(part.split("=") for part in wanted.selector.split(","))
    for pool, _ in wanted.pools:
        template = release.one("Deployment", f"-worker-{pool}")["spec"]["template"]["metadata"]
        assert labels.items() <= template["labels"].items()
    assert wanted.namespace == release.one("Deployment", "-controller")["metadata"]["namespace"]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
