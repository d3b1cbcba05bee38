"""What Ray must be told before it is first imported. Imports nothing of Ray itself."""

import os

QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
"""A token file in the user's home would otherwise turn authentication on. The last two keep Ray's
own reports of killed processes out of the output; they stay in its log files."""


def quiet_ray() -> None:
    """Set the variables for this process and all that it starts."""
    os.environ.update(QUIET)
