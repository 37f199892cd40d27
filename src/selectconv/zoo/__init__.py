"""The paper's networks, plain and selective."""

from selectconv.zoo import densenet as densenet  # registers its models
from selectconv.zoo.registry import create_model, list_models

__all__ = ["create_model", "list_models"]
