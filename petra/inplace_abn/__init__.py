"""In-place activated batch normalisation (Rota Bulò et al. 2018): the layer, the networks, data sets and metric of its paper.

The import adds the models to :data:`petra.models.MODELS`, the data sets to :data:`petra.data.DATASETS`, and the normalisations
``inplace_abn`` and ``inplace_abn_sync`` to those that residual networks accept as ``norm``.
"""

from functools import partial

from petra.data import DATASETS, DECODED
from petra.inplace_abn.confusion import ConfusionMatrix
from petra.inplace_abn.convert import authors_state, to_batch_norm, to_inplace_abn
from petra.inplace_abn.deeplab import deeplabv3
from petra.inplace_abn.layer import InPlaceABN, norm_act
from petra.inplace_abn.losses import bootstrapped_cross_entropy
from petra.inplace_abn.resnext import resnext101, resnext152, resnext_preact
from petra.inplace_abn.segmentation import camvid, cityscapes, cocostuff, segmentation, vistas
from petra.inplace_abn.wide_resnet import wide_resnet38
from petra.models import MODELS
from petra.models.layers import NORMS, Norm

PIXEL_DATASETS = ("segmentation", "camvid", "cityscapes", "vistas", "cocostuff")
"""Names of the data sets that have a class for each pixel."""
PIXEL_MODELS = ("deeplabv3",)
"""Names of the models that classify each pixel of an image."""

DATASETS.update({load.__name__: load for load in (segmentation, camvid, cityscapes, vistas, cocostuff)})
DECODED.update(PIXEL_DATASETS)
MODELS.update({build.__name__: build for build in (resnext101, resnext152, resnext_preact, wide_resnet38, deeplabv3)})
NORMS["inplace_abn"] = Norm(("leaky_relu",), norm_act)
NORMS["inplace_abn_sync"] = Norm(("leaky_relu",), partial(norm_act, synchronized=True))

__all__ = [
    "PIXEL_DATASETS",
    "PIXEL_MODELS",
    "ConfusionMatrix",
    "InPlaceABN",
    "authors_state",
    "bootstrapped_cross_entropy",
    "camvid",
    "cityscapes",
    "cocostuff",
    "deeplabv3",
    "resnext101",
    "resnext152",
    "resnext_preact",
    "segmentation",
    "to_batch_norm",
    "to_inplace_abn",
    "vistas",
    "wide_resnet38",
]
