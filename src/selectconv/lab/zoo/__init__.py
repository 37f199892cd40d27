"""The paper's networks, plain and selective."""

from selectconv.lab.zoo.registry import create_model, list_models

__all__ = ["create_model", "list_models"]
