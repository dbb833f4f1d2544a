"""A detector that looks for the centres of boxes."""

from torch import nn


def conv(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class CentreDetector(nn.Module):
    """Scores of kinds and sizes of boxes, for cells of 16 x 16 pixels."""

    def __init__(self, kinds, width=16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 4, 4),
            nn.ReLU(inplace=True),
            conv(width, 2 * width, 2),
            conv(2 * width, 2 * width, 1),
            conv(2 * width, 3 * width, 2),
            conv(3 * width, 3 * width, 1),
        )
        self.kind, self.extent = nn.Conv2d(3 * width, kinds, 1), nn.Conv2d(3 * width, 2, 1)
        nn.init.constant_(self.kind.bias, -4.0)

    def forward(self, images):
        features = self.body(images)
        return self.kind(features), self.extent(features).sigmoid()
