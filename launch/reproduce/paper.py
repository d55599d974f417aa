"""Figures printed in the papers, for comparison with ours.

PETRA: Rivaud, Fournier, Pumir, Belilovsky, Eickenberg, Oyallon, arXiv 2406.02052. The figures below are from the first version
(June 2024), which contains Tables 1 to 3 and Fig. 4, unless stated otherwise. The second version (ICLR 2025) added Tables 4 to 6
and Fig. 5 and 6. Its text was not available: of these tables only the speed-ups of Table 5 are known, so the others are left out.

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
"""By method: stored activations of stage j in graphs and in inputs, versions of its parameters, size of messages, compute, and mean
time per batch if a stage runs forward and backward at the same time. The size of 4 is that of backward messages; forward messages
are twice as large as without reversibility (section 3.3)."""

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
"""Test accuracy (%) on CIFAR-10 (mean of three runs), ImageNet32 and ImageNet, by method and model. For PETRA the paper takes the k
of 1, 2, 4, 8, 16, 32 with the best training accuracy. Backpropagation uses batches of 128 on CIFAR-10 and ImageNet32 and of 256 on
ImageNet."""

TABLE3 = {(True, True): (44.5, 0.0), (True, False): (43.6, 2.0), (False, True): (21.2, 52.3), (False, False): (20.3, 54.3)}
"""GB and percentage saved. The key is (input buffers, parameter buffers)."""

TABLE5 = {"revnet18": (10, 3.0), "revnet34": (18, 2.4)}
"""Number of GPUs, and speed-up over reversible backpropagation whose stages take turns, by model (second version)."""
