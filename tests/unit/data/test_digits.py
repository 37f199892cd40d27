"""The digits of scikit-learn: a fixed split, true statistics."""

import numpy as np
import pytest
import torch

from selectconv.errors import UsageError
from selectconv.lab.data import find_dataset, load_dataset

pytest.importorskip("sklearn", reason="digits come with scikit-learn (the train extra)")


def test_the_split_is_that_of_the_data_set():
    from sklearn.datasets import load_digits

    digits = load_digits()
    splits = load_dataset("digits")
    train, test = splits.train, splits.test
    assert (len(train), len(test)) == (1437, 360)
    assert torch.cat([train.labels, test.labels]).tolist() == digits.target.tolist()
    pixels = torch.cat([train.images, test.images]).numpy()[:, 0] / 255 * 16
    assert np.abs(pixels - digits.images).max() < 0.05  # sixteenths of 255, rounded
    # Every class is in both splits.
    assert train.labels.bincount().min() > 100
    assert test.labels.bincount().min() > 25


def test_statistics_are_those_of_the_training_set():
    splits = load_dataset("digits")
    pixels = splits.train.images.double() / 255
    assert abs(float(pixels.mean()) - splits.info.mean[0]) < 5e-5
    assert abs(float(pixels.std(correction=0)) - splits.info.std[0]) < 5e-5


def test_a_root_changes_nothing_but_must_be_there(tmp_path):
    assert len(load_dataset("digits", tmp_path).train) == 1437
    for call in (load_dataset, find_dataset):
        with pytest.raises(UsageError, match=r"`data_root` must be a folder; .*nowhere"):
            call("digits", tmp_path / "nowhere")
