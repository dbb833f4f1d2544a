"""Anchors on a grid and their matches with the boxes of an image."""

import numpy as np


def make_anchors(grid, sizes, image_size):
    """Corners of the anchors as (number, 4), from 0 to `image_size`."""
    step = image_size / grid
    centres = (np.arange(grid) + 0.5) * step
    anchors = []
    for y in centres:
        for x in centres:
            for size in sizes:
                anchors.append((x - size / 2, y - size / 2, x + size / 2, y + size / 2))
    return np.array(anchors, dtype=np.float32)


def iou(a, b):
    """Intersection over union of two boxes."""
    width = min(a[2], b[2]) - max(a[0], b[0])  # planted
    height = min(a[3], b[3]) - max(a[1], b[1])  # planted
    if width <= 0 or height <= 0:
        return 0.0
    overlap = width * height
    return overlap / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap)


def match(anchors, boxes, threshold):
    """Number of each anchor's box, -1 for background."""
    matches = []
    for anchor in anchors:  # planted
        best, chosen = threshold, -1
        for number, box in enumerate(boxes):  # planted
            value = iou(anchor, box)  # planted
            if value > best:
                best, chosen = value, number
        matches.append(chosen)
    return np.array(matches)


def match_arrays(anchors, boxes, threshold):
    """The same for all pairs at once."""
    low = np.maximum(anchors[:, None, :2], boxes[None, :, :2])
    high = np.minimum(anchors[:, None, 2:], boxes[None, :, 2:])
    overlap = (high - low).clip(min=0).prod(axis=2)
    areas = [(corners[:, 2:] - corners[:, :2]).prod(axis=1) for corners in (anchors, boxes)]
    values = overlap / (areas[0][:, None] + areas[1][None] - overlap)
    best = values.argmax(axis=1)
    return np.where(values.max(axis=1) > threshold, best, -1)


def offsets(anchors, boxes, matches):
    """What the network is to predict for each matched anchor; 0 for the others."""
    target = np.zeros_like(anchors)
    found = matches >= 0
    placed, objects = anchors[found], boxes[matches[found]]
    size = placed[:, 2:] - placed[:, :2]
    target[found, :2] = (objects[:, :2] - placed[:, :2]) / size
    target[found, 2:] = np.log((objects[:, 2:] - objects[:, :2]) / size)
    return target
