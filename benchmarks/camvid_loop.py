"""Train DeepLabV3 on CamVid in a plain PyTorch loop, with the network and the data of petra, for comparison with its methods.

``python -m benchmarks.camvid_loop ROOT [--epochs 3] [--size 160] [--batch 8] [--lr 0.05] [--norm batchnorm] [--bf16]``

ROOT is a folder with images/SPLIT and labels/SPLIT. Prints loss, pixel accuracy and mIoU on the training and the validation images
after each epoch.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from petra.data import EvalSource, TrainSource, load_dataset
from petra.models import deeplabv3

CLASSES = 11


def main() -> None:
    """Train and evaluate."""
    options = parsed()
    torch.set_num_threads(1)
    data = load_dataset("segmentation", root=options.root, classes=CLASSES, size=options.size, void=CLASSES)
    train, test = TrainSource(data, options.batch, seed=0), EvalSource(data, options.batch)
    network = deeplabv3(CLASSES, options.body, options.width, norm=options.norm, activation="leaky_relu").build(seed=0)
    network = network.to(memory_format=torch.channels_last)
    decayed = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=options.lr, momentum=0.9)
    total, done = options.epochs * train.batches_per_epoch, 0
    for epoch in range(options.epochs):
        started, losses = time.perf_counter(), []
        network.train()
        for _ in range(train.batches_per_epoch):
            for group in optimizer.param_groups:
                group["lr"] = options.lr * (1 - done / total) ** 0.9
            optimizer.zero_grad()
            loss = F.cross_entropy(scores(network, train.inputs(done), options.bf16), train.targets(done))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            done += 1
        seconds = time.perf_counter() - started
        print(
            f"epoch {epoch + 1}: train loss {np.mean(losses):.4f}, {evaluated(network, test, options.bf16)}, {seconds:.0f} s",
            flush=True,
        )


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--body", default="resnet18")
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--norm", default="batchnorm")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 by autocast")
    return parser.parse_args()


def scores(network: nn.Module, images: torch.Tensor, bf16: bool) -> torch.Tensor:
    """Return the scores of all pixels in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return network(images.contiguous(memory_format=torch.channels_last)).float()


def evaluated(network: nn.Module, test: EvalSource, bf16: bool) -> str:
    """Return pixel accuracy and mIoU on the test data."""
    network.eval()
    matrix = np.zeros((CLASSES, CLASSES), np.int64)
    for m in range(test.batches):
        with torch.no_grad():
            found = scores(network, test.inputs(m), bf16).argmax(1).numpy()
        targets = test.targets(m).numpy()
        counted = targets >= 0
        matrix += np.bincount(targets[counted] * CLASSES + found[counted], minlength=CLASSES**2).reshape(CLASSES, CLASSES)
    hits = np.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - hits
    return f"test accuracy {hits.sum() / matrix.sum():.2%}, miou {np.nanmean(hits / union):.2%}"


if __name__ == "__main__":
    main()
