"""Whether files hold what they should: ``LoadConfig.verify``."""

from loadkit.integrity.layer import Verification

__all__ = ["Verification"]
