"""The paper's networks, plain and selective."""

# Importing these registers their models.
from selectconv.zoo import condensenet as condensenet
from selectconv.zoo import densenet as densenet
from selectconv.zoo import resnet as resnet
from selectconv.zoo import resnext as resnext
from selectconv.zoo.registry import create_model, list_models

__all__ = ["create_model", "list_models"]
