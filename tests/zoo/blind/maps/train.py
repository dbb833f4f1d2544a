"""Draw maps from aerial photos with a conditional generative adversarial network."""

import argparse
import time

import torch
from data import batches, towns
from networks import PatchDiscriminator, UNetGenerator, set_requires_grad
from torch import nn


class Trainer:
    def __init__(self, args):
        self.generator, self.discriminator = UNetGenerator(), PatchDiscriminator()
        named = {"lr": args.lr, "betas": (0.5, 0.999), "fused": True}
        self.optimizer_g = torch.optim.Adam(self.generator.parameters(), **named)
        self.optimizer_d = torch.optim.Adam(self.discriminator.parameters(), **named)
        self.adversarial, self.pixels = nn.BCEWithLogitsLoss(), nn.L1Loss()
        self.detached, self.weight = args.mended, args.l1_weight

    def gan_loss(self, scores, real):
        return self.adversarial(scores, torch.full_like(scores, float(real)))

    def step_discriminator(self, photo, fake, drawn):
        set_requires_grad(self.discriminator, True)
        shown = fake.detach() if self.detached else fake  # planted
        loss_fake = self.gan_loss(self.discriminator(photo, shown), False)
        loss_real = self.gan_loss(self.discriminator(photo, drawn), True)
        loss = 0.5 * (loss_fake + loss_real)
        self.optimizer_d.zero_grad()
        loss.backward(retain_graph=not self.detached)  # planted
        self.optimizer_d.step()
        return loss.detach()

    def step_generator(self, photo, fake, drawn):
        set_requires_grad(self.discriminator, False)
        loss_gan = self.gan_loss(self.discriminator(photo, fake), True)
        loss_l1 = self.pixels(fake, drawn)
        self.optimizer_g.zero_grad()
        (loss_gan + self.weight * loss_l1).backward()
        self.optimizer_g.step()
        return loss_gan.detach(), loss_l1.detach()

    def step(self, photo, drawn):
        fake = self.generator(photo)
        return self.step_discriminator(photo, fake, drawn), *self.step_generator(photo, fake, drawn)


@torch.no_grad()
def validate(generator, photos, maps):
    generator.eval()
    error = (generator(photos) - maps).abs().mean().item()
    generator.train()
    return error


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--towns", type=int, default=640)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--l1-weight", type=float, default=50.0)
    parser.add_argument("--mended", action="store_true", help="detach what the discriminator is trained with")
    args = parser.parse_args()
    torch.manual_seed(0)
    photos, maps = towns(args.towns, args.size, seed=0)
    held_out = towns(32, args.size, seed=1)
    trainer = Trainer(args)
    for epoch in range(args.epochs):
        begin, losses = time.time(), []
        for photo, drawn in batches(photos, maps, args.batch_size):
            losses.append(torch.stack(trainer.step(photo, drawn)))
        loss_d, loss_gan, loss_l1 = torch.stack(losses).mean(0).tolist()
        print(f"epoch {epoch} D {loss_d:.3f} G {loss_gan:.3f} L1 {loss_l1:.3f} ({time.time() - begin:.1f} s)")
        print(f"epoch {epoch} held out L1 {validate(trainer.generator, *held_out):.3f}")


if __name__ == "__main__":
    main()
