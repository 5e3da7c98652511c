"""Models of `transformers` and `peft`, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from data import images, split, tokens, waves
from torch import Tensor, nn
from trial import Trial, case

NEEDS = ("transformers",)
TEXT = "transformers: text"
SEEN = "transformers: images and sound"
V = 40  # words


def inside(model: nn.Module) -> Any:
    """The loss that the model returns when it is given labels."""
    return lambda **inputs: model(**inputs).loss


def by_name(*names: str) -> Any:
    """Batches of keyword arguments, as a data collator makes them."""
    return lambda loss: lambda *batch: loss(**dict(zip(names, batch, strict=True)))


def language_model(model: nn.Module) -> Trial:
    ids = tokens()
    return Trial(model, lambda ids: model(input_ids=ids, labels=ids).loss, split(8, ids))


def next_word(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@case("GPT-2, loss inside", TEXT, needs=NEEDS)
def gpt2() -> Trial:
    from transformers import GPT2Config, GPT2LMHeadModel

    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return language_model(
        GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=16, n_embd=32, n_layer=2, n_head=2, **none))
    )


def llama_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32,
        )
    )  # fmt: skip


@case("Llama, loss inside", TEXT, needs=NEEDS)
def llama() -> Trial:
    return language_model(llama_model())


@case("Llama, loss outside", TEXT, needs=NEEDS)
def llama_outside() -> Trial:
    model = llama_model()
    return Trial(model, lambda ids: next_word(model(input_ids=ids).logits, ids), split(8, tokens()))


@case("Llama in bfloat16 autocast", TEXT, needs=NEEDS)
def llama_autocast() -> Trial:
    model = llama_model()

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    return Trial(model, loss, split(8, tokens()))


@case("Mixtral", TEXT, needs=NEEDS)
def mixtral() -> Trial:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    return language_model(MixtralForCausalLM(config))


@case("T5, translating", TEXT, needs=NEEDS)
def t5() -> Trial:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=V, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    ids = tokens()
    return Trial(model, lambda a, b: model(input_ids=a, labels=b).loss, split(8, ids, (ids + 1) % V))


def masked(ids: Tensor, share: float = 0.3) -> tuple[Tensor, Tensor]:
    """Some words hidden (word 1), and labels that ignore all others."""
    hidden = torch.rand(ids.shape) < share
    return ids.masked_fill(hidden, 1), ids.masked_fill(~hidden, -100)


@case("BERT, masked words", TEXT, needs=NEEDS)
def bert() -> Trial:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    return Trial(model, lambda a, b: model(input_ids=a, labels=b).loss, split(8, *masked(tokens())))


@case("BERT, classification with dropout", TEXT, needs=NEEDS, steps=80)
def bert_classes() -> Trial:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[::2, -4:] = 0
    return Trial(
        model, lambda a, m, y: model(input_ids=a, attention_mask=m, labels=y).loss, split(8, ids, mask, ids[:, 0] % 3)
    )


@case("DistilBERT, tags with ignored labels", TEXT, needs=NEEDS)
def distilbert() -> Trial:
    from transformers import DistilBertConfig, DistilBertForTokenClassification

    config = DistilBertConfig(
        vocab_size=V, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=16, dropout=0.0,
        attention_dropout=0.0, num_labels=3,
    )  # fmt: skip
    model = DistilBertForTokenClassification(config)
    ids = tokens()
    labels = (ids % 3).masked_fill(torch.rand(ids.shape) < 0.3, -100)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())

    return Trial(model, loss, split(8, ids, labels))


@case("LoRA on Llama (peft)", TEXT, needs=("transformers", "peft"))
def lora() -> Trial:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj"], lora_dropout=0.0)
    return language_model(get_peft_model(llama_model(), config))


@case("CLIP", SEEN, needs=NEEDS)
def clip() -> Trial:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={
            "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 16, "projection_dim": 16, "eos_token_id": 2,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 8, "projection_dim": 16,
        },
        projection_dim=16,
    )  # fmt: skip
    model = CLIPModel(config)
    x, _ = images(32)
    return Trial(
        model, lambda ids, x: model(input_ids=ids, pixel_values=x, return_loss=True).loss, split(16, tokens(), x)
    )


def classifier(model: nn.Module, size: int = 16, count: int = 64) -> Trial:
    x, y = images(count, size=size)
    return Trial(model, lambda x, y: F.cross_entropy(model(pixel_values=x).logits, y), split(16, x, y))


@case("ViT", SEEN, needs=NEEDS)
def vit() -> Trial:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, num_labels=4,
    )  # fmt: skip
    return classifier(ViTForImageClassification(config))


@case("Swin", SEEN, needs=NEEDS)
def swin() -> Trial:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=4,
        drop_path_rate=0.0,
    )  # fmt: skip
    return classifier(SwinForImageClassification(config), size=32)


@case("ConvNeXt", SEEN, needs=NEEDS)
def convnext() -> Trial:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=2, num_labels=4)
    return classifier(ConvNextForImageClassification(config))


@case("ResNet, batch norm", SEEN, needs=NEEDS)
def resnet() -> Trial:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4,
        downsample_in_first_stage=False,
    )  # fmt: skip
    return classifier(ResNetForImageClassification(config))


@case("MobileNetV2", SEEN, needs=NEEDS, steps=80)  # 53 norms over 16 samples: the first 40 are a matter of the seed
def mobilenet() -> Trial:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=32, depth_multiplier=0.1, depth_divisible_by=4, min_depth=4, num_labels=4)
    config.classifier_dropout_prob = 0.0
    return classifier(MobileNetV2ForImageClassification(config), size=32)


@case("Wav2Vec2", SEEN, needs=NEEDS)
def wav2vec2() -> Trial:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        num_labels=4, classifier_proj_size=16, mask_time_prob=0.0, hidden_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, num_feat_extract_layers=2,
    )  # fmt: skip
    model = Wav2Vec2ForSequenceClassification(config)
    return Trial(model, lambda x, y: model(input_values=x, labels=y).loss, split(8, *waves()))
