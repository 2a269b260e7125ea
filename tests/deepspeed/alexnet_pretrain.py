"""AlexNet as in DeepSpeed's own example of a pipeline: a list of bare layers, with a lambda among them.

An ordinary DeepSpeed script. Smaller than the original, for images of 32 x 32, so that a CPU trains it.
"""

import argparse
import os

import torch
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.pipe import PipelineModule

NUM_CLASSES = 10


class Images(torch.utils.data.Dataset):  # type: ignore[misc]
    """Random images with random classes, the same ones in every process."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._images = torch.randn(count, 3, 32, 32, generator=generator)
        self._classes = torch.randint(NUM_CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._images[index], self._classes[index]


def layers() -> list[object]:
    """Features, pooling, a lambda and the classifier, as the example joins them."""
    features = [
        nn.Conv2d(3, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=2),
        nn.Conv2d(32, 48, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(48, 32, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=2),
    ]
    classifier = [
        nn.Dropout(),
        nn.Linear(32 * 2 * 2, 128),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(128, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, NUM_CLASSES),
    ]
    return [*features, nn.AdaptiveAvgPool2d((2, 2)), lambda x: torch.flatten(x, 1), *classifier]


def main() -> None:
    """Train on two stages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=40)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = PipelineModule(
        layers=layers(),
        num_stages=2,
        loss_fn=nn.CrossEntropyLoss(),
        partition_method="parameters",
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        training_data=Images(512),
    )
    for _ in range(args.steps):
        engine.train_batch()


if __name__ == "__main__":
    main()
