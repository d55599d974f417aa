"""All targets of ``python -m reproduction``: tables and figures of two papers."""

from . import accuracy, checkpointing, complexity, gradients, memory, revnet, speed
from .report import Target

TARGETS = {
    "table1": Target("PETRA, Table 1: complexity of one stage", complexity.table1),
    "table2": Target("PETRA, Table 2: accuracy", accuracy.table2, trains=True),
    "table3": Target("PETRA, Table 3: memory of RevNet-50 on ImageNet", memory.table3),
    "table4": Target("PETRA, Table 4: which buffers delayed gradients need", accuracy.table4, trains=True),
    "table5": Target("PETRA, Table 5: mean iteration time", speed.table5, trains=True),
    "table6": Target("PETRA, Table 6: memory by stage", memory.table6, trains=True),
    "fig4": Target("PETRA, Fig. 4: accumulation", accuracy.fig4, trains=True),
    "fig5": Target("PETRA, Fig. 5: cosines and norm ratios between gradients", gradients.fig5, trains=True),
    "fig6": Target("PETRA, Fig. 6: cosines between gradients by stage", gradients.fig6, trains=True),
    "revnet-table1": Target("RevNet, Table 1: stored activations and compute", checkpointing.table1),
    "revnet-table2": Target("RevNet, Table 2: networks and parameters", revnet.table2),
    "revnet-table3": Target("RevNet, Table 3: classification error on CIFAR", revnet.table3, trains=True),
    "revnet-table4": Target("RevNet, Table 4: classification error on ImageNet", revnet.table4, trains=True),
    "revnet-fig3": Target("RevNet, Fig. 3: training curves on ImageNet", revnet.fig3, trains=True),
    "revnet-fig4": Target("RevNet, Fig. 4: gradients from reconstructed activations", gradients.revnet_fig4, trains=True),
    "revnet-partitions": Target("RevNet, section 3.1: partition of the units", revnet.partitions, trains=True),
    "revnet-depth": Target("RevNet, appendix 7.2: memory of 600 layers", revnet.depth),
}
