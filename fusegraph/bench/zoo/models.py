"""The models of the zoo: how each is made, without its weights being loaded, and its inputs.

torchvision and transformers are imported when a model of theirs is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: What the elements of a model and of its inputs are; "fp32" and "tf32" differ in `fusegraph.bench.precision`.
DTYPES = ("bf16", "fp32", "tf32")
#: bfloat16 computed from elements of float32, as torch's autocast does: of training alone.
AUTOCAST = "amp"
#: Where models are from, as their names begin; the last are those of the suite of decoding.
TORCHVISION, TRANSFORMERS, LLAMA = "tv", "hf", "llama"


def element(dtype: str) -> Any:
    """Returns torch's dtype of the elements."""
    import torch

    return torch.bfloat16 if dtype == "bf16" else torch.float32


@dataclass(frozen=True)
class Model:
    """A model.

    name    as users ask for it, such as "tv:resnet50".
    batch   how many images or sequences the results are told for.
    make    makes it on torch's default device, for inference; what it is given replaces parts of its configuration.
    inputs  of a batch: keyword arguments, or the image alone under "".
    """

    name: str
    batch: int
    make: Callable[..., Any]
    inputs: Callable[[int], dict[str, Any]]

    def loaded(
        self, dtype: str, device: str, batch: int | None = None, **changes: Any
    ) -> tuple[Any, list[str], list[Any]]:
        """Returns the module with random weights, the names of its inputs as `called` takes them, and these.

        All are the same each time; on the device "meta" they have no values.  Those of ``dtype`` "bf16" are bfloat16,
        of all others float32.  ``changes`` are what the model's configuration says instead.
        """
        import torch

        kind = element(dtype)
        torch.manual_seed(0)
        with torch.device(device):
            module = self.make(**changes).to(kind).requires_grad_(False)
            inputs = self.inputs(batch or self.batch)
        return module, list(inputs), [x.to(kind) if x.is_floating_point() else x for x in inputs.values()]


@dataclass(frozen=True)
class _Image:
    side: int = 224
    name: str = "pixel_values"
    channels: int = 3

    def __call__(self, batch: int) -> dict[str, Any]:
        import torch

        return {self.name: torch.randn(batch, self.channels, self.side, self.side)}


@dataclass(frozen=True)
class _Tokens:
    """Sequences of ``length`` tokens of a vocabulary."""

    length: int
    vocabulary: int

    def __call__(self, batch: int) -> dict[str, Any]:
        import torch

        return {"input_ids": torch.randint(0, self.vocabulary, (batch, self.length))}


@dataclass(frozen=True)
class _Sound:
    """Spectrograms of half a minute."""

    bands: int = 80
    frames: int = 3000

    def __call__(self, batch: int) -> dict[str, Any]:
        import torch

        return {"input_features": torch.randn(batch, self.bands, self.frames)}


#: torchvision's models of images, all at batch 64; and those that are not 224 x 224.
_IMAGES = (
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "densenet121",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mnasnet1_0",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "vgg16",
    "alexnet",
    "googlenet",
    "inception_v3",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "regnet_y_8gf",
    "regnet_x_8gf",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "swin_v2_t",
    "maxvit_t",
)
_SIDES = {"inception_v3": 299}
_BATCH = 64


def _torchvision(name: str) -> Model:
    def make(**changes: Any) -> Any:
        from torchvision import models

        more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return models.get_model(name, weights=None, **more, **changes).eval()

    return Model(f"{TORCHVISION}:{name}", _BATCH, make, _Image(_SIDES.get(name, 224), ""))


@dataclass(frozen=True)
class _Transformer:
    """A model of transformers: its class without "Model" or "For...", and what its configuration says.

    part  the part of the model that is called: its encoder.
    """

    kind: str
    batch: int
    inputs: Callable[[int], dict[str, Any]]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    head: str = "Model"
    part: str = ""

    def make(self, **changes: Any) -> Any:
        import transformers

        told = {"use_cache": False} if self.head == "ForCausalLM" or self.kind == "GPT2" else {}
        kind, _, config = self.kind.partition("|")
        configuration = getattr(transformers, f"{config or kind}Config")(**{**self.sizes, **told, **changes})
        model = getattr(transformers, f"{kind}{self.head}")(configuration).eval()
        return getattr(model, self.part) if self.part else model


def _llama(batch: int, length: int) -> _Transformer:
    sizes = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    return _Transformer("Llama", batch, _Tokens(length, 128256), sizes, "ForCausalLM")


_TRANSFORMERS: dict[str, _Transformer] = {
    "gpt2": _Transformer("GPT2", 8, _Tokens(1024, 50257), head="LMHeadModel"),
    "gpt2-prefill1": _Transformer("GPT2", 1, _Tokens(128, 50257), head="LMHeadModel"),
    "llama-1b": _llama(2, 2048),
    "llama-1b-s128": _llama(1, 128),
    "bert-base": _Transformer("Bert", 32, _Tokens(512, 30522)),
    "distilbert": _Transformer("DistilBert", 64, _Tokens(128, 30522)),
    "roberta": _Transformer("Roberta", 32, _Tokens(512, 50265), {"max_position_embeddings": 514}),
    "deberta-v2": _Transformer(
        "DebertaV2", 8, _Tokens(512, 128100),
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    "t5-encoder": _Transformer(
        "T5Encoder|T5", 16, _Tokens(512, 32128),
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    ),
    "vit": _Transformer("ViT", 64, _Image()),
    "clip-vision": _Transformer(
        "CLIPVision", 16, _Image(),
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
         "patch_size": 14},
    ),
    "convnext": _Transformer("ConvNext", 64, _Image()),
    "whisper-encoder": _Transformer(
        "Whisper", 8, _Sound(),
        {"d_model": 768, "encoder_layers": 12, "decoder_layers": 1, "encoder_attention_heads": 12,
         "encoder_ffn_dim": 3072},
        part="encoder",
    ),
    "qwen2-0.5b": _Transformer(
        "Qwen2", 2, _Tokens(1024, 151936),
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "vocab_size": 151936},
        "ForCausalLM",
    ),
    "gemma2": _Transformer(
        "Gemma2", 2, _Tokens(1024, 64000),
        {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 12, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 64000},
        "ForCausalLM",
    ),
    "mistral": _Transformer(
        "Mistral", 2, _Tokens(2048, 32000),
        {"hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 4, "sliding_window": 512, "vocab_size": 32000},
        "ForCausalLM",
    ),
    "segformer": _Transformer("Segformer", 8, _Image(512)),
    "dinov2": _Transformer("Dinov2", 32, _Image()),
    "opt": _Transformer(
        "OPT", 8, _Tokens(512, 50272),
        {"hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "num_attention_heads": 12},
        "ForCausalLM",
    ),
    "bart-encoder": _Transformer(
        "Bart", 16, _Tokens(512, 50265),
        {"d_model": 768, "encoder_layers": 6, "decoder_layers": 1, "encoder_ffn_dim": 3072,
         "encoder_attention_heads": 12},
        part="encoder",
    ),
}  # fmt: skip

#: Every model by name.
MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        *map(_torchvision, _IMAGES),
        *(Model(f"{TRANSFORMERS}:{name}", of.batch, of.make, of.inputs) for name, of in _TRANSFORMERS.items()),
    )
}


def called(module: Any, names: Sequence[str]) -> Callable[..., Any]:
    """Returns the function of a module's inputs, which have these names, that gives its first result."""

    def call(*arguments: Any) -> Any:
        return first(module(*arguments) if names == [""] else module(**dict(zip(names, arguments))))

    return call


def first(result: Any) -> Any:
    """Returns the first tensor of a model's result."""
    import torch

    if isinstance(result, torch.Tensor):
        return result
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    # No generator: torch 2.11 cuts a graph at one that calls itself, and what is behind it is then a result as well.
    for each in result.values() if isinstance(result, dict) else result:
        if each is not None and (found := first(each)) is not None:
            return found
    return None
