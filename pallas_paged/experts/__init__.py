"""Products of experts: matrices of rows that are grouped, and the routed MLPs of a model."""

from pallas_paged.experts.fused import fused_experts
from pallas_paged.experts.grouped import ExpertsImplementation, grouped_matmul

__all__ = ["ExpertsImplementation", "fused_experts", "grouped_matmul"]
