"""ECDM as an importance in Torch-Pruning's own pruners."""

import copy
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchvision_shim
from selectconv.functional import expected_activation, expected_relu
from tiny_models import Net

tp = pytest.importorskip("torch_pruning", reason="needs selectconv[pruning]")
from selectconv.integrations.torch_pruning import ECDMImportance  # noqa: E402

IMAGES = torch.zeros(1, 3, 8, 8)


def randomize_norms(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.2, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.5)
    return model


def small_cnn():
    layers = {
        "conv1": nn.Conv2d(3, 8, 3, bias=False),
        "norm1": nn.BatchNorm2d(8),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(8, 6, 3, bias=False),
        "norm2": nn.BatchNorm2d(6),
        "relu2": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flatten": nn.Flatten(),
        "head": nn.Linear(24, 5),
    }
    return randomize_norms(nn.Sequential(OrderedDict(layers)))


def group_of(model, conv, images=IMAGES, indices=None):
    graph = tp.DependencyGraph().build_dependency(model, images)
    indices = list(range(conv.out_channels)) if indices is None else indices
    return graph.get_pruning_group(conv, tp.prune_conv_out_channels, idxs=indices)


def naive_scores(mean, kernel_sums):
    """max_j of nECDM, with loops: `kernel_sums` is (I, O)."""
    slots, outputs = kernel_sums.shape
    damage = [
        [abs(float((mean[i] * kernel_sums[i, j]).detach())) for j in range(outputs)]
        for i in range(slots)
    ]
    totals = [sum(damage[i][j] for i in range(slots)) for j in range(outputs)]
    return torch.tensor(
        [max(damage[i][j] / totals[j] for j in range(outputs)) for i in range(slots)]
    )


def assert_scores(scores, expected):
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def test_scores_are_the_readers_largest_damage():
    model = small_cnn()
    mean = expected_relu(model.norm1.bias, model.norm1.weight)
    expected = naive_scores(mean, model.conv2.weight.sum(dim=(2, 3)).T)
    scores = ECDMImportance()(group_of(model, model.conv1))
    assert_scores(scores, expected)
    assert not scores.requires_grad
    some = ECDMImportance()(group_of(model, model.conv1, indices=[6, 1, 3]))
    assert_scores(some, expected[[6, 1, 3]])


def test_a_linear_behind_a_flattening_reads_several_columns_of_a_channel():
    model = small_cnn()
    mean = expected_relu(model.norm2.bias, model.norm2.weight)
    expected = naive_scores(mean, model.head.weight.view(5, 6, 4).sum(dim=2).T)
    assert_scores(ECDMImportance()(group_of(model, model.conv2)), expected)


def read_twice(net, x):
    x = F.silu(net.norm(net.conv(x)))
    return net.left(x), net.right(x)


def test_the_largest_of_two_readers_counts():
    layers = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)}
    readers = {"left": nn.Conv2d(4, 3, 1), "right": nn.Conv2d(4, 2, 1)}
    model = randomize_norms(Net(read_twice, **layers, **readers))
    mean = expected_activation(model.norm.bias, model.norm.weight, F.silu)
    left, right = (naive_scores(mean, one.weight[:, :, 0, 0].T) for one in readers.values())
    scores = ECDMImportance()(group_of(model, model.conv))
    torch.testing.assert_close(scores, torch.maximum(left, right), rtol=1e-3, atol=1e-5)


def concatenate(net, x):
    left, right = net.norm_a(net.a(x)), net.norm_b(net.b(x))
    return net.c(torch.cat([torch.relu(left), torch.relu(right)], dim=1))


def test_concatenated_channels_are_scored_where_they_stand():
    left = {"a": nn.Conv2d(3, 4, 3), "norm_a": nn.BatchNorm2d(4)}
    right = {"b": nn.Conv2d(3, 6, 3), "norm_b": nn.BatchNorm2d(6)}
    model = randomize_norms(Net(concatenate, **left, **right, c=nn.Conv2d(10, 5, 1)))
    means = [expected_relu(norm.bias, norm.weight) for norm in (model.norm_a, model.norm_b)]
    expected = naive_scores(torch.cat(means), model.c.weight[:, :, 0, 0].T)
    assert_scores(ECDMImportance()(group_of(model, model.a)), expected[:4])
    assert_scores(ECDMImportance()(group_of(model, model.b)), expected[4:])


def sum_without_norm(net, x):
    x = torch.relu(net.conv1(x))
    return F.avg_pool2d(net.conv2(x) + net.skip(x), 2)


@pytest.mark.parametrize("images", [IMAGES, (IMAGES,)], ids=["unbatched", "batched"])
def test_moments_pass_through_convs_sums_and_pools_without_norm(images):
    """A network without batch norm, against a Monte Carlo of what its last conv reads."""
    layers = {"conv1": nn.Conv2d(3, 32, 3), "conv2": nn.Conv2d(32, 16, 1)}
    last = {"skip": nn.Conv2d(32, 16, 1), "conv3": nn.Conv2d(16, 4, 1, bias=False)}
    model = Net(lambda net, x: net.conv3(sum_without_norm(net, x)), **layers, **last)
    with torch.no_grad():
        mean = sum_without_norm(model, torch.randn(400, 3, 8, 8)).mean(dim=(0, 2, 3))
    expected = naive_scores(mean, model.conv3.weight[:, :, 0, 0].T)
    scores = ECDMImportance()(group_of(model, model.conv2, images))
    # 3600 correlated samples a channel: means of order 0.1 are known to about 2 %.
    torch.testing.assert_close(scores, expected, rtol=0.15, atol=0.01)


def test_rms_sees_what_the_mean_does_not():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    group = group_of(model, model[0])
    assert bool((ECDMImportance()(group) == 0).all()), "the mean of a fresh batch norm is 0"
    assert bool((ECDMImportance("rms")(group) > 0).all())


def test_what_cannot_be_followed_has_no_score():
    layers = {"conv1": nn.Conv2d(3, 4, 1), "conv2": nn.Conv2d(4, 2, 1)}
    model = Net(lambda net, x: net.conv2(net.conv1(x).square()), **layers)
    assert ECDMImportance()(group_of(model, model.conv1)) is None


def test_a_pruner_removes_the_channels_that_nobody_needs():
    model = small_cnn()
    with torch.no_grad():
        model.conv2.weight[:, [2, 5]] = 0
        model.head.weight.view(5, 6, 4)[:, [0]] = 0
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    pruner = tp.pruner.BasePruner(
        model, IMAGES, ECDMImportance(), global_pruning=True, pruning_ratio=3 / 14,
        ignored_layers=[model.head],
    )  # fmt: skip
    pruner.step()
    assert sorted(pruner.pruning_history()) == [["conv1", True, [2, 5]], ["conv2", True, [0]]]
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)


def test_pruning_a_residual_network_of_torchvision():
    torchvision_shim.install()
    models = pytest.importorskip("torchvision.models", reason="needs torchvision")
    model = randomize_norms(models.resnet18(weights=None, num_classes=10))
    dense = copy.deepcopy(model)
    x = torch.randn(1, 3, 32, 32)
    pruner = tp.pruner.BasePruner(
        model, x, ECDMImportance(), global_pruning=True, pruning_ratio=0.3, iterative_steps=2,
        ignored_layers=[model.fc],
    )  # fmt: skip
    for _ in range(2):  # the second step scores a network whose shapes have changed
        pruner.step()
    cut = sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    whole = sum(m.out_channels for m in dense.modules() if isinstance(m, nn.Conv2d))
    assert 0.55 * whole < cut < 0.8 * whole
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_wrong_damage_is_refused():
    with pytest.raises(ValueError, match="`damage` must be one of mean, rms; got 'auto'"):
        ECDMImportance("auto")


def test_without_torch_pruning_it_says_what_to_install():
    script = """
import sys
sys.modules["torch_pruning"] = None
try:
    import selectconv.integrations.torch_pruning
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == (
        "selectconv.integrations.torch_pruning needs Torch-Pruning: "
        "pip install 'selectconv[pruning]'."
    )


@pytest.mark.parametrize("outputs", [4, 8])
def test_transposed_convs_are_read_by_their_own_axes(outputs):
    torch.manual_seed(0)
    reader = nn.ConvTranspose2d(8, outputs, 2, stride=2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), reader)
    reader.weight.detach()[5].zero_()  # nobody reads channel 5
    pruner = tp.pruner.BasePruner(
        model, IMAGES, ECDMImportance(), pruning_ratio=1 / 8, ignored_layers=[reader]
    )
    pruner.step()
    assert [channels for _, _, channels in pruner.pruning_history()] == [[5]]
