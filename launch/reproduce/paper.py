"""What the papers print, for the tables beside ours.

PETRA: Rivaud, Fournier, Pumir, Belilovsky, Eickenberg, Oyallon, arXiv 2406.02052. Its first version (June 2024) has Tables 1 to 3
and Fig. 4, and is the source of what stands here unless another is named. Tables 4 to 6 and Fig. 5 and 6 came with the second
version (ICLR 2025), whose text was not at hand: of their figures only the speed-ups of Table 5 are known here, so the others are
left out.

RevNet: Gomez, Ren, Urtasun, Grosse, NeurIPS 2017, arXiv 1707.04585.
"""

from __future__ import annotations

TABLE1 = {
    "backprop": ("graph", "", "1", "1", "3J", "3J"),
    "reversible": ("0", "0", "1", "4", "4J", "4J"),
    "delayed, graphs kept": ("2(J − j) graphs", "", "2(J − j) / k", "1", "3J", "2"),
    "dsp": ("", "2(J − j)", "1", "1", "4J", "3"),
    "petra": ("0", "0", "1", "4", "4J", "3"),
}
"""By row: activations in graphs and in inputs of stage j, versions of parameters, volume of messages, work, and mean time of a
batch if F and B of a stage run at the same time. The volume of 4 is that of backward messages, forward ones double (section
3.3)."""

TABLE2 = {
    ("backprop", "resnet18"): (95.0, 54.0, 70.8),
    ("reversible", "revnet18"): (94.9, 54.6, 70.8),
    ("petra", "revnet18"): (94.9, 54.6, 71.0),
    ("backprop", "resnet34"): (95.5, 56.5, 74.0),
    ("reversible", "revnet34"): (95.3, 56.4, 73.2),
    ("petra", "revnet34"): (94.8, 56.1, 73.5),
    ("backprop", "resnet50"): (94.8, 58.8, 75.6),
    ("reversible", "revnet50"): (95.2, 59.7, 75.4),
    ("petra", "revnet50"): (94.5, 59.6, 74.8),
}
"""Test accuracy (%) on CIFAR-10 (mean of three runs), ImageNet32, ImageNet. PETRA's k is the best of 1, 2, 4, 8, 16, 32 on the
training set; backpropagation has batches of 128 on the first two and 256 on ImageNet."""

TABLE3 = {(True, True): (44.5, 0.0), (True, False): (43.6, 2.0), (False, True): (21.2, 52.3), (False, False): (20.3, 54.3)}
"""GB, and % saved, by (input buffers, parameter buffers)."""

TABLE5 = {"revnet18": (10, 3.0), "revnet34": (18, 2.4)}
"""GPUs, and times as fast as reversible backpropagation whose stages take turns (second version)."""
