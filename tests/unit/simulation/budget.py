"""How long the machines run: the figures of each test by default, times TANDEM_MACHINE_SCALE for more.

Only with TANDEM_MACHINE_SHRINK=1 is a history that breaks a promise cut down, for that takes minutes.
"""

import os

from hypothesis import HealthCheck, Phase, settings

SCALE = float(os.environ.get("TANDEM_MACHINE_SCALE", "1"))
SHRINK = (Phase.shrink,) if os.environ.get("TANDEM_MACHINE_SHRINK") else ()


def budget(*, examples: int, steps: int) -> settings:
    """Settings of one machine: so many histories of at most so many rules."""
    return settings(
        max_examples=max(1, round(examples * SCALE)), stateful_step_count=steps, deadline=None, print_blob=True,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, *SHRINK),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
