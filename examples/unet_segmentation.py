"""A U-Net that finds the discs among drawn discs and squares."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selectconv as sc

EPOCHS = 4
SIZE = 24


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw a disc and a square on noise: images (N, 1, SIZE, SIZE) and the disc's pixels."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    centre = torch.rand(4, count, 1, 1, generator=generator) * (SIZE - 8) + 4
    radius = torch.rand(2, count, 1, 1, generator=generator) * 3 + 3
    disc = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius[0] ** 2
    square = torch.maximum((rows - centre[2]).abs(), (columns - centre[3]).abs()) < radius[1]
    noise = 0.1 * torch.randn(count, SIZE, SIZE, generator=generator)
    return (1.0 * (disc | square) + noise).unsqueeze(1), (1.0 * disc).unsqueeze(1)


def block(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Three scales; each goes across to the same scale of the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(block(1, 16), block(16, 16))
        self.down2 = block(16, 32)
        self.bottom = nn.Sequential(block(32, 32), block(32, 32))
        self.up2 = block(32 + 32, 32)
        self.up1 = block(32 + 16, 16)
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute a logit for each pixel."""
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2.0), second], dim=1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), first], dim=1))
        return self.head(x)


images, masks = draw(300, seed=0)
test_images, test_masks = draw(80, seed=1)
torch.manual_seed(0)
model = sc.convert(UNet(), images[:1])
print(sc.describe(model))
optimizer = torch.optim.AdamW(sc.param_groups(model), lr=0.005, weight_decay=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * 20)
allocator = sc.ChannelAllocator(model, optimizer, total_epochs=EPOCHS, gamma=0.05, grace=2)


@torch.no_grad()
def overlap() -> float:
    """Intersection over union of found and true discs."""
    model.eval()
    found, true = model(test_images) > 0, test_masks > 0
    model.train()
    return ((found & true).sum() / (found | true).sum()).item()


start = overlap()
for epoch in range(EPOCHS):
    for part in torch.randperm(len(images)).split(15):
        loss = F.binary_cross_entropy_with_logits(model(images[part]), masks[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(allocator.step(epoch), f"- overlap {overlap():.3f}")
print(f"test overlap: {start:.3f} -> {overlap():.3f}")
