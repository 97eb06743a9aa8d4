"""Resources of the job API; `FineTuning`, `Jobs` and `Batches` are those of v1alpha1."""

from upweight.api_client.resources.v1 import V1
from upweight.api_client.resources.v1alpha1 import Batches, FineTuning, Jobs, V1Alpha1

__all__ = ["V1", "Batches", "FineTuning", "Jobs", "V1Alpha1"]
