"""What may go wrong with a deployment as a whole, each with a stable ``code``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from hotkv_trio._errors import HotKVError


@attrs.frozen(slots=False, eq=False)
class DeploymentFailed(HotKVError):
    """What was asked of a deployment could not be done; what had been begun for it was taken back."""

    code: ClassVar[str] = "deployment_failed"
    name: str
    """Of the deployment."""
    what: str
    """What is missing, and where to look."""

    def __str__(self) -> str:
        """Say what is missing."""
        return f"deployment {self.name}: {self.what}"


@attrs.frozen(slots=False, eq=False)
class DeploymentUnknown(HotKVError):
    """The cluster has no deployment of this name."""

    code: ClassVar[str] = "deployment_unknown"
    name: str

    def __str__(self) -> str:
        """Say the name."""
        return f"this cluster has no deployment named {self.name}"
