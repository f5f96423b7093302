"""An order that the tests of orders and of the driver share."""

from tandem.controlplane.ray.messages import Order
from tandem.core.config import WorkerConfig
from tandem.core.state_enums import RoleName

ORDER = Order(
    config=WorkerConfig(
        cluster="test", worker_id="prefill-0", role=RoleName.PREFILL, pool="prefill", model="m", model_dir="/m",
        revision="", dtype="auto", max_model_len=0, redis_url="redis://a", secret_file="", runtime_dir="",
    ),
    threads=2,
)  # fmt: skip
