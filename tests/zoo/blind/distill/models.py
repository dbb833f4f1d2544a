"""Teacher and student: the same kind of network, wide and narrow."""

from torch import nn


class SeparableBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )

    def forward(self, x):
        return self.layers(x)


class MobileNet(nn.Module):
    def __init__(self, width, classes=20):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            SeparableBlock(width, 2 * width, 2),
            SeparableBlock(2 * width, 2 * width, 1),
            SeparableBlock(2 * width, 4 * width, 2),
            SeparableBlock(4 * width, 4 * width, 1),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, images):
        return self.classifier(self.pool(self.blocks(self.stem(images))).flatten(1))


def teacher_network():
    """Stands for a trained one."""
    return MobileNet(40)


def student_network():
    return MobileNet(16)
