"""What every JSON line says of the machine and the software that it was measured on."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np

from toque import __version__
from toque.kernels import cpu_model, physical_cores, usable_cpus


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cpus": len(usable_cpus()),
        "cores": physical_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "toque": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        # At the end of the run. Above the number of busy threads, others were working too: a peer
        # whose threads spin (OpenMP) then loses far more than one whose threads sleep.
        "load_1min": os.getloadavg()[0],
    }
