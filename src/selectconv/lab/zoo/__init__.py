"""The paper's networks, plain and selective."""

# Importing these registers their models.
from selectconv.lab.zoo import densenet as densenet
from selectconv.lab.zoo import resnet as resnet
from selectconv.lab.zoo.registry import create_model, list_models

__all__ = ["create_model", "list_models"]
