"""Embeddings, classes and scores by `LLM` and `AsyncLLM`: folders of sentence-transformers, decoders, bad input."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from encoder_checkpoints import expected_rows, make_encoder, random_prompts
from safetensors.torch import load_file, save_file
from tokenizers_made import make_pair_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

from phonograph import LLM, AsyncLLM, PoolingParams, SamplingParams
from phonograph.core.token_types import TypedTokens
from phonograph.errors import ConfigError, ModelError, PhonographError, RequestError

RAW = PoolingParams(use_activation=False)
MODULES = {
    "Transformer": "",
    "Pooling": "1_Pooling",
    "Dense": "2_Dense",
    "Normalize": "3_Normalize",
}


def make_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"max_num_seqs": 3, "max_num_batched_tokens": 80, "enforce_eager": True, **settings})


def make_folder(folder: Path, modules: list[str], pooling: dict[str, Any], **files: Any) -> None:
    """Write the files of sentence-transformers next to a model."""
    entries = [
        {"idx": 0, "name": "0", "path": MODULES[name], "type": f"sentence_transformers.models.{name}"}
        for name in modules
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for name in modules[1:]:
        (folder / MODULES[name]).mkdir()
    if "Pooling" in modules:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def add_dense(folder: Path, size: int, **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weight, bias = torch.randn(size, 48) * 0.2, torch.randn(size)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    content = {
        "in_features": 48,
        "out_features": size,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "2_Dense" / "config.json").write_text(json.dumps({**content, **config}))
    return weight, bias


def unit(row: torch.Tensor) -> np.ndarray:
    return (row / row.norm()).numpy()


@pytest.mark.parametrize("old", [True, False])
def test_a_folder_of_sentence_transformers(old: bool, tmp_path: Path) -> None:
    """Its pooling, dense layer, norm, length and prompts are obeyed, in older and newer files."""
    model = make_encoder("bert", tmp_path)
    make_pair_tokenizer(tmp_path)
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 48}
    make_folder(
        tmp_path,
        ["Transformer", "Pooling", "Dense", "Normalize"],
        pooling if old else {"pooling_mode": "cls", "embedding_dimension": 48, "include_prompt": True},
        sentence_bert_config={"max_seq_length": 20, "do_lower_case": old},
        config_sentence_transformers={"prompts": {"query": "w7 w8 ", "document": ""}, "default_prompt_name": "query"},
    )
    weight, bias = add_dense(tmp_path, 20)
    with make_llm(tmp_path) as llm:
        assert llm.plan.limits.max_model_len == 20
        assert llm.plan.model.pooler is not None and llm.plan.model.pooler.tasks == ("embed",)
        text = "W1 w2 w3" if old else "w1 w2 w3"
        outputs = {name: llm.embed(text, prompt_name=name, use_tqdm=False)[0] for name in (None, "query", "document")}
        assert outputs[None].prompt_token_ids == [1, 11, 12, 5, 6, 7, 2] == outputs["query"].prompt_token_ids
        assert outputs["document"].prompt_token_ids == [1, 5, 6, 7, 2]
        for output in outputs.values():
            row = torch.tanh(expected_rows(model, output.prompt_token_ids)[0] @ weight.t() + bias)
            assert np.allclose(output.outputs.data, unit(row), rtol=0, atol=1e-4)
        cut = PoolingParams(dimensions=7)
        (output,) = llm.embed(text, pooling_params=cut, use_tqdm=False)
        assert np.allclose(output.outputs.data, unit(row_of(outputs["query"])[:7]), rtol=0, atol=1e-5)
        with pytest.raises(RequestError, match="document"):
            llm.embed(text, prompt_name="qeury", use_tqdm=False)


def row_of(output: Any) -> torch.Tensor:
    return torch.from_numpy(output.outputs.data)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: make_folder(folder, ["Transformer", "Pooling"], {"pooling_mode": "max"}), "max"),
        (
            lambda folder: make_folder(folder, ["Transformer", "Pooling"], {"pooling_mode": ["cls", "mean"]}),
            "cls and mean",
        ),
        (
            lambda folder: make_folder(folder, ["Transformer", "Normalize", "Pooling"], {"pooling_mode": "cls"}),
            "Normalize",
        ),
        (
            lambda folder: make_folder(
                folder, ["Transformer", "Pooling"], {"pooling_mode": "cls", "embedding_dimension": 7}
            ),
            "48",
        ),
    ],
)
def test_folders_that_are_refused(change: Callable[[Path], None], problem: str, tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    change(tmp_path)
    with pytest.raises(ModelError, match=problem):
        make_llm(tmp_path)


def test_a_dense_module_that_is_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    make_folder(tmp_path, ["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"})
    add_dense(tmp_path, 8, activation_function="torch.nn.modules.activation.Mish")
    with pytest.raises(ModelError, match="Mish"):
        make_llm(tmp_path)
    add_dense(tmp_path, 8, module_input_name="token_embeddings")
    with pytest.raises(ModelError, match="module_input_name"):
        make_llm(tmp_path)


def test_texts_and_pairs(tmp_path: Path) -> None:
    """Texts are cut at their ends, of a pair the longer one first, and types tell the two apart."""
    model = make_encoder("bert_classes", tmp_path, num_labels=1)
    make_pair_tokenizer(tmp_path)
    with make_llm(tmp_path) as llm:
        longest = PoolingParams(truncate_prompt_tokens=9)
        outputs = llm.score(
            "w1 w2", ["w3", " ".join(f"w{number}" for number in range(30))], pooling_params=longest, use_tqdm=False
        )
        assert [output.prompt_token_ids for output in outputs] == [[1, 5, 6, 2, 7, 2], [1, 5, 6, 2, 4, 5, 6, 7, 2]]
        for output, second in zip(outputs, (2, 5), strict=True):
            ids = output.prompt_token_ids
            logit = expected_rows(model, ids, token_type_ids=[0] * (len(ids) - second) + [1] * second)
            assert abs(output.outputs.score - torch.sigmoid(logit).item()) < 1e-5
        (one,) = llm.classify("w1 " * 30, pooling_params=longest, use_tqdm=False)
        assert one.prompt_token_ids == [1, *[5] * 7, 2]
        for params, problem in (
            (PoolingParams(truncate_prompt_tokens=2), "special tokens"),
            (PoolingParams(truncate_prompt_tokens=400), "70"),
        ):
            with pytest.raises(RequestError, match=problem):
                llm.classify("w1 w2", pooling_params=params, use_tqdm=False)
        with pytest.raises(RequestError, match="as many"):
            llm.score(["w1", "w2"], ["w3"], use_tqdm=False)
        with pytest.raises(RequestError, match="dimensions"):
            llm.classify("w1", pooling_params=PoolingParams(dimensions=1), use_tqdm=False)


def test_a_pair_needs_a_token_between_its_texts(tmp_path: Path) -> None:
    make_encoder("xlm_roberta_score", tmp_path)
    make_pair_tokenizer(tmp_path, pairs=False)
    with make_llm(tmp_path) as llm, pytest.raises(RequestError, match="no token between"):
        llm.score("w1", "w2", use_tqdm=False)


def test_refusals_of_requests_lose_nothing_of_others(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    with make_llm(tmp_path, max_num_batched_tokens=64) as llm:
        good, long, whole, outside = random_prompts(10)[0], [5] * 71, [5] * 66, [5, 1 << 20]
        outputs = llm.embed([good, long, whole, outside, [], [5 | 1 << 30], good], use_tqdm=False)
        assert np.array_equal(outputs[0].outputs.data, outputs[-1].outputs.data)
        problems = [str(output.error) for output in outputs[1:-1]]
        for problem, part in zip(problems, ("70", "max_num_batched_tokens=64", "100", "empty", "100"), strict=True):
            assert part in problem, problem
        with pytest.raises(RequestError, match="66"):
            _ = outputs[2].outputs
        with pytest.raises(RequestError, match="generates nothing"):
            llm.generate([good], SamplingParams(), use_tqdm=False)
        with pytest.raises(RequestError, match="classify"):
            llm.classify([good], use_tqdm=False)
        with pytest.raises(RequestError, match="1 to 48"):
            llm.embed([good], pooling_params=PoolingParams(dimensions=49), use_tqdm=False)
        with pytest.raises(RequestError, match="without a tokenizer"):
            llm.embed("w1", use_tqdm=False)
        assert llm.embed([], use_tqdm=False) == []


def test_rows_that_are_not_finite_fail_their_request(tmp_path: Path) -> None:
    """The others of its step, and those that wait, have their results."""
    make_encoder("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][7] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with make_llm(tmp_path) as llm:
        outputs = llm.embed([[5, 6], [6, 7], [5, 6], [8], [9], [7], [5, 6]], use_tqdm=False)
        assert [output.error is not None for output in outputs] == [False, True, False, False, False, True, False]
        assert "not finite" in str(outputs[1].error) and llm.engine.core.scheduler.stats.blocks_used == 0
        assert np.abs(outputs[0].outputs.data - outputs[6].outputs.data).max() < 1e-5


@pytest.mark.parametrize(
    "values", [{"task": "rank"}, {"dimensions": 0}, {"truncate_prompt_tokens": -2}, {"normalise": True}]
)
def test_pooling_parameters_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        PoolingParams(**values)


def decoder_rows(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(torch.tensor([prompt])).last_hidden_state[0]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_decoders_embed(family: str, tmp_path: Path) -> None:
    """The last token after the final norm, in chunks and with cached prefixes."""
    model = make_checkpoint(family, tmp_path)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,)).tolist() for length in (1, 2, 31, 33, 100)]
    with make_llm(tmp_path, convert="embed", max_num_batched_tokens=32, num_kv_blocks=40, max_model_len=100) as llm:
        first = llm.embed(prompts, use_tqdm=False)
        again = llm.embed(prompts, use_tqdm=False)
    for prompt, one, other in zip(prompts, first, again, strict=True):
        wanted = unit(decoder_rows(model, prompt)[-1])
        assert np.allclose(one.outputs.data, wanted, rtol=0, atol=1e-4)
        assert np.allclose(other.outputs.data, wanted, rtol=0, atol=1e-4)
    assert again[-1].num_cached_tokens == 96
    with make_llm(tmp_path) as llm, pytest.raises(RequestError, match="convert=embed"):
        llm.embed([prompts[0]], use_tqdm=False)


def test_decoders_that_look_ahead_or_pool_all_tokens(tmp_path: Path) -> None:
    model = make_checkpoint("qwen2", tmp_path, num_hidden_layers=1)
    make_folder(tmp_path, ["Transformer", "Pooling", "Normalize"], {"pooling_mode": "mean"})
    prompt = torch.randint(3, VOCAB_SIZE, (40,)).tolist()
    with make_llm(tmp_path) as llm:
        assert llm.plan.limits.whole_prompts
        (output,) = llm.embed([prompt], use_tqdm=False)
    assert np.allclose(output.outputs.data, unit(decoder_rows(model, prompt).mean(0)), rtol=0, atol=1e-4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    model.config.is_causal = False
    with make_llm(tmp_path) as llm:
        (ahead,) = llm.embed([prompt], use_tqdm=False)
    assert np.allclose(ahead.outputs.data, unit(decoder_rows(model, prompt).mean(0)), rtol=0, atol=1e-4)
    assert np.abs(ahead.outputs.data - output.outputs.data).max() > 1e-2


def test_heads_of_decoders(tmp_path: Path) -> None:
    """Scores of the last token, and files without `model.`."""
    config_class, _, settings = FAMILIES["qwen3"]
    config = config_class(**{**settings, "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 88})
    config.num_hidden_layers, config.pad_token_id, config.num_labels = 2, 0, 3
    config.layer_types = config.layer_types[:2]
    prompt = torch.randint(3, VOCAB_SIZE, (21,)).tolist()
    torch.manual_seed(0)
    scorer = Qwen3ForSequenceClassification(config).eval()
    scorer.save_pretrained(tmp_path / "scorer")
    with make_llm(tmp_path / "scorer", max_model_len=64) as llm:
        (output,) = llm.classify([prompt], use_tqdm=False)
        assert not llm.plan.limits.whole_prompts
    with torch.inference_mode():
        wanted = scorer(torch.tensor([prompt])).logits[0].softmax(-1)
    assert np.allclose(output.outputs.probs, wanted, rtol=0, atol=1e-5)
    bare = Qwen3Model(config).eval()
    bare.save_pretrained(tmp_path / "bare")
    with make_llm(tmp_path / "bare", max_model_len=64) as llm:
        (output,) = llm.embed([prompt], use_tqdm=False)
    with torch.inference_mode():
        row = bare(torch.tensor([prompt])).last_hidden_state[0, -1]
    assert np.allclose(output.outputs.data, unit(row), rtol=0, atol=1e-4)


CARD = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {instruction}
<Query>: {query}
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ORIGINAL: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["w7", "w9"],
    "is_original_qwen3_reranker": True,
}


def make_generator(folder: Path, *, tied: bool) -> tuple[Any, Any]:
    """Write a decoder with its head and a tokenizer without a separator; return both, of transformers."""
    config_class, _, settings = FAMILIES["qwen3"]
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2}
    config = config_class(**{**settings, **sizes, "tie_word_embeddings": tied})
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    make_pair_tokenizer(folder, pairs=False)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_of_two_tokens(tied: bool, tmp_path: Path) -> None:
    """Qwen3-Reranker as published: the softmax over the logits of two tokens, and the template of its model card."""
    model, tokenizer = make_generator(tmp_path, tied=tied)

    def expected(text: str) -> tuple[list[int], float]:
        ids = tokenizer(text, truncation=False, padding=False)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        return ids, float(logits[[11, 13]].softmax(-1)[1])

    documents = ["w4 w5", "w6", "w30 w31 w32 w33"]
    cut = PoolingParams(truncate_prompt_tokens=-1)
    with make_llm(tmp_path, hf_overrides=ORIGINAL, max_model_len=70) as llm:
        for document, output in zip(documents, llm.score("w1 w2", documents, use_tqdm=False), strict=True):
            ids, score = expected(CARD.format(instruction=INSTRUCTION, query="w1 w2", document=document))
            assert output.prompt_token_ids == ids and abs(output.outputs.score - score) < 1e-5
        own = '{{ messages[0]["content"] }} w20 {{ messages[1]["content"] }}'
        (output,) = llm.score("w1 w2", "w3", chat_template=own, use_tqdm=False)
        assert (
            output.prompt_token_ids == [5, 6, 24, 7] and abs(output.outputs.score - expected("w1 w2 w20 w3")[1]) < 1e-5
        )
        (long,) = llm.score("w1 w2", " ".join(["w5"] * 100), pooling_params=cut, use_tqdm=False)
        assert len(long.prompt_token_ids) == 70 and long.prompt_token_ids[-4:] == ids[-4:]
        with pytest.raises(RequestError, match="leaves no room"):
            llm.score("w1 " * 100, "w5", pooling_params=cut, use_tqdm=False)


def test_classes_from_rows_of_the_head(tmp_path: Path) -> None:
    model, _ = make_generator(tmp_path, tied=False)
    plain = {**ORIGINAL, "method": "no_post_processing", "is_original_qwen3_reranker": False}
    plain["classifier_from_token"] = ["w3", "w7", 13]
    with make_llm(tmp_path, hf_overrides=plain, max_model_len=64) as llm:
        (output,) = llm.classify([[5, 6, 7]], use_tqdm=False)
        assert llm.plan.model.pooler is not None and llm.plan.model.pooler.labels == ("w3", "w7", "13")
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1, [7, 11, 13]]
    assert np.allclose(output.outputs.probs, logits.softmax(-1), rtol=0, atol=1e-5)
    for change, problem in (
        ({"classifier_from_token": ["w7"]}, "two tokens"),
        ({"classifier_from_token": ["w7", "yes"]}, "has no token 'yes'"),
        ({"is_original_qwen3_reranker": False}, "from_2_way_softmax"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "ForSequenceClassification"),
    ):
        with pytest.raises(ModelError, match=problem):
            make_llm(tmp_path, hf_overrides={**ORIGINAL, **change})


@pytest.mark.parametrize(
    "settings",
    [
        {"num_kv_blocks": 40},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"quantize_lm_head": "fp8"},
        {"quantization": "fp8"},
    ],
)
def test_settings_of_models_that_generate(settings: dict[str, Any], tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    with pytest.raises(PhonographError, match=next(iter(settings))) as caught:
        make_llm(tmp_path, **settings)
    assert isinstance(caught.value, ConfigError)


def test_an_engine_for_an_event_loop(tmp_path: Path) -> None:
    """Many prompts in one call, one prompt by vLLM's form, tasks for servers, and messages that can be pickled."""
    make_encoder("bert", tmp_path)
    make_pair_tokenizer(tmp_path)
    prompts = ["w1 w2", [1, 5, 2], TypedTokens.of([1, 5, 2, 6, 2], [0, 0, 0, 1, 1])]
    assert pickle.loads(pickle.dumps(prompts[2])).plain == [1, 5, 2, 6, 2]

    async def run() -> None:
        settings: dict[str, Any] = {"max_num_seqs": 2, "enforce_eager": True}
        async with AsyncLLM(str(tmp_path), **settings) as llm:
            assert llm.facts.pooler is not None and llm.facts.pooler.tasks == ("embed", "token_embed")
            assert llm.facts.context_len == 70 and llm.facts.row_size == 48
            outputs = await llm.pool(prompts * 20, PoolingParams(task="embed"))
            assert [output.prompt_token_ids for output in outputs[:3]] == [[1, 5, 6, 2], [1, 5, 2], [1, 5, 2, 6, 2]]
            assert np.abs(outputs[0].outputs.data - outputs[57].outputs.data).max() < 1e-5
            assert llm.num_open == 0
            (one,) = [output async for output in llm.encode("w1 w2", PoolingParams(), "name")]
            assert one.request_id == "name" and np.abs(one.outputs.data - outputs[0].outputs.data).max() < 1e-5
            tokens = await llm.pool([[1, 5, 2]], PoolingParams(task="token_embed"))
            assert tokens[0].outputs.data.shape == (3, 48)
            pair = llm.pooled_inputs.pair("w1", "w2", PoolingParams())
            assert isinstance(pair, TypedTokens) and pair.plain == [1, 5, 2, 6, 2]
            for wrong in ([[200]], [[5] * 71], [""]):
                with pytest.raises(RequestError):
                    await llm.pool([*prompts, *wrong], PoolingParams())
            with pytest.raises(RequestError, match="generates nothing"):
                _ = [output async for output in llm.generate([1, 5, 2], SamplingParams())]

    asyncio.run(run())
