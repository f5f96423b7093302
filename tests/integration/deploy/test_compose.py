"""Everything that compose.yaml has a container run exists here, and no container may do more than it needs."""

import re
import subprocess
from pathlib import Path

import pytest
from jsonschema_rs import validator_for

from tandem.controlplane.container_entrypoints import readiness_probe
from tandem.controlplane.container_entrypoints.__main__ import parser
from tandem.controlplane.container_entrypoints.prestop import HAND_BACK_S
from tandem.controlplane.container_entrypoints.records import WORKER_PORT
from tandem.controlplane.resolve import check
from tandem.core.config import Anonymous, ClusterConfig, RouterSection
from tandem.core.config_loader import load
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.transports.acceptor import MAX_STRANGERS
from tandem.kvtransfer.transports.tcp_listener import MAX_CONNECTIONS
from tandem.router.server.shutdown import AFTER_DRAIN_S
from tandem.workerhost.host import SERVER_GRACE_S, STOP_TIMEOUT_S
from tandem.workerhost.membership import LEAVE_TIMEOUT_S
from tests.integration.deploy.composing import COMPOSE, CONFIG, FILE, OURS, SERVICES, Service, placed, seconds, service
from tests.integration.deploy.dockerfile import stages
from tests.integration.deploy.rendering import CHART, ROOT, Helm

SECRETS = {name: f"{name} of thirty-two bytes!\n" for name in ("cluster-secret", "admin-key", "redis-password")}
each_service = pytest.mark.parametrize("each", SERVICES, ids=lambda each: str(each.name))
each_of_ours = pytest.mark.parametrize("each", OURS, ids=lambda each: str(each.name))


def test_it_is_a_router_and_one_worker_of_each_role_beside_redis() -> None:
    assert {each.name for each in SERVICES} == {"redis", "router", "prefill", "decode", "clusterctl"}
    assert {each.name for each in OURS} == {"router", "prefill", "decode"}


@each_of_ours
def test_every_flag_is_taken_and_every_file_is_mounted(each: Service) -> None:
    wanted = parser().parse_args(each.command[3:])
    assert each.command[:3] == ["python", "-m", "tandem.controlplane.container_entrypoints"]
    for path in (wanted.config, wanted.cluster_secret, wanted.redis_password, getattr(wanted, "admin_key", None)):
        assert path is None or str(path) in each.files()
    folders = {mount.split(":")[0] for mount in each.spec["tmpfs"]}
    assert str(wanted.folder) in folders
    assert stages()[each.target].variables()["HOME"] in folders
    if wanted.part == "worker":
        assert str(wanted.cpus) == each.spec["deploy"]["resources"]["limits"]["cpus"]
        assert wanted.host == each.spec["networks"]["cluster"]["ipv4_address"]
        assert wanted.port == WORKER_PORT
        assert wanted.role == each.name == wanted.pool
        drained = parser().parse_args(each.hook[3:])
        assert (each.hook[:3], drained.part, drained.folder) == (each.command[:3], "drain", wanted.folder)


@each_of_ours
def test_every_command_says_that_its_configuration_is_right(each: Service, tmp_path: Path) -> None:
    place = placed(tmp_path, each, SECRETS)
    command = [*place.command(each.command), "--check-config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is right" in done.stdout


def test_the_configuration_says_what_the_services_are() -> None:
    config = load(FILE.parent / "compose" / "cluster.toml", ClusterConfig)
    router = check(config)
    assert router.anonymous is Anonymous.NEVER
    assert config.worker.device == "cuda"
    published = {port.split(":")[-1] for port in service("router").spec["ports"]}
    assert published == {str(router.port), str(router.grpc_port)}, "not the admin port"
    assert str(router.admin_port) not in published
    counts = {"prefill": config.pools.prefill, "decode": config.pools.decode, "mixed": config.pools.mixed}
    assert counts == {"prefill": 1, "decode": 1, "mixed": 0}
    assert CONFIG["redis"]["url"] == "redis://redis:6379/0", "without the password"


@each_of_ours
def test_its_health_is_asked_of_its_own_ports(each: Service) -> None:
    words = each.spec["healthcheck"]["test"]
    assert words[:4] == ["CMD", "python", "-m", "tandem.controlplane.container_entrypoints.readiness_probe"]
    assert words[4:] == ["--folder", str(parser().parse_args(each.command[3:]).folder)]
    assert seconds(each.spec["healthcheck"]["timeout"]) > readiness_probe.TIMEOUT_S


@each_of_ours
def test_it_has_time_to_end(each: Service) -> None:
    grace_s = seconds(each.spec["stop_grace_period"])
    if each.name == "router":
        assert grace_s >= RouterSection().drain_s + AFTER_DRAIN_S
    else:
        assert grace_s >= HAND_BACK_S + LEAVE_TIMEOUT_S + SERVER_GRACE_S + STOP_TIMEOUT_S


@each_of_ours
def test_strangers_do_not_use_up_a_workers_threads(each: Service) -> None:
    """Each connection to the port for KV has a thread, also while it proves nothing."""
    if each.name != "router":
        pids = each.spec["deploy"]["resources"]["limits"]["pids"]
        assert pids > MAX_CONNECTIONS + 2 * MAX_STRANGERS + 512


@each_service
def test_containers_can_change_nothing_and_gain_nothing(each: Service) -> None:
    assert each.spec["read_only"] is True
    assert each.spec["cap_drop"] == ["ALL"]
    assert each.spec["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & set(each.spec)
    limits = each.spec["deploy"]["resources"]["limits"]
    assert set(limits) == {"cpus", "memory", "pids"}
    user = each.spec.get("user") or stages()[each.target].last("USER")
    for mount in each.spec["tmpfs"]:
        owner = re.search(r"uid=(\d+),gid=(\d+),mode=0700", mount)
        assert mount == "/tmp:size=1g" or (owner and f"{owner[1]}:{owner[2]}" == user), "nobody else looks in"


@each_service
def test_secrets_are_files_and_nobody_has_one_that_it_does_not_read(each: Service) -> None:
    assert set(each.spec.get("environment", {})) <= {"HF_HOME"}
    has = {path for path in each.files() if path.startswith("/etc/tandem/secrets/")}
    scripts = "".join(path.read_text() for path in each.files().values() if path.suffix == ".sh")
    reads = {path for path in has if any(path in word for word in each.command) or path in scripts}
    assert has == (reads or {"/etc/tandem/secrets/admin-key"})
    assert all("secrets/" in entry["file"] for entry in COMPOSE["secrets"].values())
    ignored = subprocess.run(["git", "check-ignore", "deploy/compose/secrets/admin-key"], cwd=ROOT, check=False)
    assert ignored.returncode == 0, "git never takes them"


def test_secrets_are_made_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "deploy" / "images" / "README.md").read_text()
    [block] = re.findall(r"```bash\n(mkdir .*?)```", page, re.DOTALL)
    (tmp_path / "deploy" / "compose").mkdir(parents=True)
    subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, check=True, timeout=60)
    folder = tmp_path / "deploy" / "compose" / "secrets"
    assert {path.name for path in folder.iterdir()} == {Path(each["file"]).name for each in COMPOSE["secrets"].values()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o444}
    assert len({path.read_text() for path in folder.iterdir()}) == 3
    ClusterSecret.load(folder / "cluster-secret")


def test_redis_is_the_chart_s(helm: Helm) -> None:
    theirs = helm.render((CHART / "ci" / "minimal.yaml").read_text())
    files = {Path(target).name: path.read_text() for target, path in service("redis").files().items() if path.is_file()}
    assert {name: text.strip() for name, text in files.items()} == {
        name: text.strip() for name, text in theirs.config("-redis-config").items()
    }
    [redis] = [each for each in theirs.containers() if each.name == "redis"]
    assert service("redis").spec["image"].startswith(f"{redis.spec['image']}.")
    assert service("redis").command == redis.command
    assert service("redis").spec["healthcheck"]["test"][1:] == redis.spec["readinessProbe"]["exec"]["command"]


def test_each_worker_has_a_gpu_and_memory_to_share() -> None:
    devices = []
    for name in ("prefill", "decode"):
        [device] = service(name).spec["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        devices += device["device_ids"]
        assert "exec" in next(mount for mount in service(name).spec["tmpfs"] if "/var/cache" in mount).split(",")
    assert devices == ["0", "1"]


def test_images_are_those_that_are_built() -> None:
    tags = (ROOT / "deploy" / "images" / "bake.json").read_text()
    for each in SERVICES:
        name, tag = each.spec["image"].split(":")
        assert f"{name}:${{TAG}}" in tags if each.target else tag != "latest"


def test_keys_are_such_as_compose_knows() -> None:
    """Of its specification as far as it is used here; see schemas/README.md."""
    schema = (Path(__file__).parent / "schemas" / "compose.json").read_text()
    validator = validator_for(schema)
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    broken = {**COMPOSE, "services": {"redis": {**service("redis").spec, "read_onli": True}}}
    assert not validator.is_valid(broken)
