"""Distil a large image classifier into a small one."""

import argparse
import logging

import torch
from losses import distillation_loss
from models import student_network, teacher_network
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
log = logging.getLogger("distill")


def make_images(count, classes=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    images = torch.randn(count, 3, 32, 32, generator=generator) * 0.3
    images[:, 1] += labels[:, None, None] / classes
    return TensorDataset(images, labels)


class Distiller:
    """Teacher, student and the student's optimizer."""

    def __init__(self, args):
        self.args = args
        self.teacher = teacher_network().eval()
        self.student = student_network()
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=args.lr, momentum=0.9, fused=True)

    def teacher_scores(self, images):
        if self.args.mended:
            with torch.no_grad():
                return self.teacher(images)
        return self.teacher(images)  # planted

    def step(self, images, labels):
        scores = self.student(images)
        wanted = self.teacher_scores(images)
        loss = distillation_loss(scores, wanted, labels, self.args.temperature, self.args.weight)
        self.optimizer.zero_grad()
        loss.backward()  # planted
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, loader):
        self.student.eval()
        right = sum((self.student(images).argmax(1) == labels).sum().item() for images, labels in loader)
        self.student.train()
        return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--weight", type=float, default=0.7)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--mended", action="store_true", help="run the teacher without recording a graph")
    args = parser.parse_args()
    torch.manual_seed(0)

    train = DataLoader(make_images(args.images), args.batch_size, shuffle=True)
    test = DataLoader(make_images(64, seed=1), args.batch_size)
    distiller = Distiller(args)
    for epoch in range(args.epochs):
        losses = [distiller.step(images, labels) for images, labels in train]
        mean = torch.stack(losses).mean().item()
        log.info("epoch %d loss %.4f accuracy %.3f", epoch, mean, distiller.accuracy(test))


if __name__ == "__main__":
    main()
