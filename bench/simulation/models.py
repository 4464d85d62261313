"""Owns what models weigh and read: the shapes of well-known ones, or those of a folder's config.json. bf16.

Only dense decoders with a gated MLP are known; biases and norms, less than 0.1% of the weights, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.simulation.names import pick
from engine.errors import InvalidArgument
from engine.settings import Dtype
from engine.sizes import DTYPE_BYTES, ModelSizes, read_model_config
from router.tokenizer import Tokenizer

DTYPE: Dtype = "bfloat16"
_TOKENIZER = "tokenizer.json"
_GATED_DENSE = ("llama", "mistral", "phi3", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What ids mean, whatever an embedding is padded to.

    Attributes:
        name: of the family, or a folder's own fingerprint.
        num_ids: that the tokenizer knows.
    """

    name: str
    num_ids: int


_LLAMA_3, _QWEN_2_5 = Vocabulary("llama-3", 128256), Vocabulary("qwen2.5", 151665)
_FAMILIES = (_LLAMA_3, _QWEN_2_5)


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder.

    Attributes:
        is_tied: the head is the embedding table.
        vocabulary: None where nothing says what it is.
    """

    name: str
    sizes: ModelSizes
    is_tied: bool = False
    vocabulary: Vocabulary | None = None

    @property
    def num_weights(self) -> int:
        """Of all layers, the embedding and the head."""
        table = self.sizes.vocab_size * self.sizes.hidden_size
        return self.num_multiplied + (0 if self.is_tied else table)

    @property
    def num_multiplied(self) -> int:
        """Weights that every row is multiplied with, and that every forward reads: all but a separate embedding."""
        sizes = self.sizes
        attention = 2 * sizes.hidden_size * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim
        mlp = 3 * sizes.hidden_size * sizes.intermediate_size
        return sizes.num_layers * (attention + mlp) + sizes.vocab_size * sizes.hidden_size

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * DTYPE_BYTES[DTYPE]

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, over all ranks."""
        return self.sizes.kv_block_bytes(1, DTYPE)


def _llama(name: str, layers: int, hidden: int, mlp: int, heads: int, head_dim: int, context: int) -> Model:
    """The Llama 3 family: eight key/value heads, 128,256 ids; the small ones tie their embedding."""
    sizes = ModelSizes(layers, hidden, mlp, heads, 8, head_dim, _LLAMA_3.num_ids, context)
    return Model(name, sizes, hidden < 4096, _LLAMA_3)


def _qwen(name: str, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int) -> Model:
    """Qwen2.5: heads of hidden / heads features, 32,768 tokens; tables of the small ones are tied and less padded."""
    is_tied = hidden < 3584
    vocab = 151936 if is_tied else 152064
    sizes = ModelSizes(layers, hidden, mlp, heads, kv_heads, hidden // heads, vocab, 32768)
    return Model(name, sizes, is_tied, _QWEN_2_5)


# From the config.json files that Meta and Qwen publish with the weights.
_ALL = (
    _llama("llama-3-8b", 32, 4096, 14336, 32, 128, 8192),
    _llama("llama-3-70b", 80, 8192, 28672, 64, 128, 8192),
    _llama("llama-3.1-8b", 32, 4096, 14336, 32, 128, 131072),
    _llama("llama-3.3-70b", 80, 8192, 28672, 64, 128, 131072),
    _llama("llama-3.2-1b", 16, 2048, 8192, 32, 64, 131072),
    _llama("llama-3.2-3b", 28, 3072, 8192, 24, 128, 131072),
    _qwen("qwen2.5-0.5b", 24, 896, 4864, 14, 2),
    _qwen("qwen2.5-1.5b", 28, 1536, 8960, 12, 2),
    _qwen("qwen2.5-3b", 36, 2048, 11008, 16, 2),
    _qwen("qwen2.5-7b", 28, 3584, 18944, 28, 4),
    _qwen("qwen2.5-14b", 48, 5120, 13824, 40, 8),
    _qwen("qwen2.5-32b", 64, 5120, 27648, 40, 8),
    _qwen("qwen2.5-72b", 80, 8192, 29568, 64, 8),
)

MODELS: Mapping[str, Model] = {model.name: model for model in _ALL}


def pick_model(name: str, field: str) -> Model:
    """By name, or from a folder with a config.json; `field` is what asked for it.

    Raises:
        InvalidArgument: no such name, or a kind of model whose weights this cannot count.
        ModelNotFound: the folder's config.json cannot be read.
    """
    folder = Path(name).expanduser()
    return _from_folder(folder, field) if folder.is_dir() else pick(name, MODELS, field, " or a model folder")


def _from_folder(folder: Path, field: str) -> Model:
    config = read_model_config(folder)
    kind = str(config.model_type)
    if kind not in _GATED_DENSE:
        raise InvalidArgument(field, f"{folder} of type {kind}", f"a dense decoder: {', '.join(_GATED_DENSE)}")
    is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    return Model(folder.name or str(folder), ModelSizes.of(config), is_tied, _vocabulary(folder))


def _vocabulary(folder: Path) -> Vocabulary | None:
    """That of the folder's tokenizer, if it has one. Raises ModelNotFound where it cannot be read."""
    if not (folder / _TOKENIZER).is_file():
        return None
    tokenizer = Tokenizer(folder)
    return Vocabulary(tokenizer.fingerprint(), tokenizer.vocab_size)


def check_pair(target: Model, draft: Model, field: str) -> None:
    """Whether the draft's tokens can be the target's, as far as it is known.

    Raises:
        InvalidArgument: they cannot; `field` is what asked for the draft.
    """
    if _differ(target, draft) or _differ(draft, target):
        smaller = [each for each in _ALL if each.num_weights < target.num_weights]
        names = ", ".join(each.name for each in smaller if each.vocabulary == target.vocabulary)
        allowed = f"a model with the vocabulary of {target.name}"
        raise InvalidArgument(field, draft.name, f"{allowed}: {names}" if names else allowed)


def _differ(one: Model, other: Model) -> bool:
    """Whether what is known of one's vocabulary rules out that the other has the same."""
    mine, theirs = one.vocabulary, other.vocabulary
    if mine is None:
        return False
    if theirs is None:
        return other.sizes.vocab_size < mine.num_ids
    is_same_kind = (mine in _FAMILIES) == (theirs in _FAMILIES)  # a family's fingerprint is not known
    return mine.num_ids != theirs.num_ids or (is_same_kind and mine.name != theirs.name)
