"""Narrow models of the four kinds that HAP was tried on, written as a user would write them; nothing of hethub."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.nn import functional as F


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for wider in (6, 8):
            layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
            width = wider
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(32, 12), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(12, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = torch.flatten(self.pool(self.features(images)), 1)
        return F.cross_entropy(self.classifier(values), labels)


class VGG19(nn.Module):
    """All nineteen layers, and torchvision's initial weights, under which no layer's gradient vanishes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for wider, count in ((4, 2), (4, 2), (6, 4), (8, 4), (8, 4)):
            for _ in range(count):
                layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU(inplace=True)]
                nn.init.kaiming_normal_(layers[-2].weight, mode="fan_out", nonlinearity="relu")  # type: ignore[arg-type]
                width = wider
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(32, 12), nn.ReLU(True), nn.Linear(12, 12), nn.ReLU(True), nn.Linear(12, 10)
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = torch.flatten(self.pool(self.features(images)), 1)
        return F.cross_entropy(self.classifier(values), labels)


class ViT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        values = torch.cat([self.token.expand(patches.shape[0], -1, -1), patches], 1) + self.positions
        return F.cross_entropy(self.head(self.encoder(values)[:, 0]), labels)


class Bert(nn.Module):
    """transformers' BERT with its loss over masked tokens."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        self.model = BertForMaskedLM(
            BertConfig(
                vocab_size=40, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=24,
                max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


class Experts(nn.Module):
    """A mixture of experts with top-2 routing, dispatched by einsums as in GShard."""

    def __init__(self, width: int, experts: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scores = self.gate(values).softmax(-1)  # [samples, tokens, experts]
        best, chosen = scores.topk(2, dim=-1)
        weights = (F.one_hot(chosen, scores.shape[-1]).to(scores.dtype) * best.unsqueeze(-1)).sum(-2)
        places = (weights > 0).to(scores.dtype)
        sent = torch.einsum("bte,btw->ebtw", places, values)
        made = torch.einsum("ebti,eiw->ebtw", F.gelu(torch.einsum("ebtw,ewi->ebti", sent, self.up)), self.down)
        return torch.einsum("bte,ebtw->btw", weights, made)


class BertMoE(nn.Module):
    """transformers' BERT in which every second layer has experts for its MLP."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.bert = Bert(layers)
        for layer in self.bert.model.bert.encoder.layer[1::2]:
            layer.intermediate, layer.output = Experts(16, 6, 24), Added()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.bert(tokens, labels)


class Added(nn.Module):
    """The end of a BERT layer behind experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, values: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self.norm(values + before)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.experts = Experts(16, 6, 24)
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = self.embedding(tokens)
        normed = self.norm(values)
        values = values + self.attention(normed, normed, normed, need_weights=False)[0]
        values = values + self.experts(values)
        return F.cross_entropy(self.head(values).flatten(0, 1), labels.flatten())


class Residual(nn.Module):
    """Convolutions with norms over the batch as torch converts them, one of which averages all it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=None), nn.BatchNorm2d(6).eval()])
        self.head = nn.Linear(6, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = F.relu(self.norms[0](self.first(images)), inplace=True)
        values = values + self.norms[1](self.second(values))
        return F.cross_entropy(self.head(self.norms[2](values).mean((2, 3))), labels)


def residual() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(Residual())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg": VGG, "vit": ViT, "bert": Bert, "moe": MoE, "bert-moe": BertMoE, "residual": residual, "vgg19": VGG19,
    "vit12": partial(ViT, 12), "bert12": partial(Bert, 12), "bert-moe12": partial(BertMoE, 12),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model in float64 and a batch for it, the same in every process."""
    torch.manual_seed(0)
    module = MODELS[name]().double()
    generator = torch.Generator().manual_seed(1)
    inputs: Any
    if name.startswith(("v", "residual")):
        side = 32 if name == "vgg19" else 8
        images = torch.randn(6, 3, side, side, generator=generator, dtype=torch.float64)
        inputs = (images, torch.randint(10, (6,), generator=generator))
    else:
        labels = torch.randint(40, (6, 8), generator=generator)
        labels[0, :3] = -100  # ignored targets: ranks' batches count unlike numbers of them
        inputs = (torch.randint(40, (6, 8), generator=generator), labels)
    return module, inputs


NAMES = ("vgg", "vit", "bert", "moe")
