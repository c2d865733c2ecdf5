"""Long documents: corpora as they are published, metrics, and models in front of, or made of, a small random BERT."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from benchmarks.corpora import by_hash, pubmed, rfcs
from benchmarks.evidence_common import corpus_sizes, kept_bytes
from sklearn.metrics import f1_score

import setstream as ss
from setstream.errors import ConfigurationError, DataError
from setstream.tasks.documents import MODELS, Documents
from setstream.tasks.documents.corpora import Document, by_order, corpus_of, eurlex, reuters
from setstream.tasks.documents.language import Language, Longformer, framed, read_pretrained
from setstream.tasks.documents.models import word_clusters
from setstream.tasks.documents.task import best_threshold, f1_scores, intervals
from setstream.tasks.documents.tokens import tokens_of
from setstream.training import Encode, TrainConfig, Trainer
from setstream.training.checkpoint import freeze, train_mode
from setstream.training.task import SavedRun, read_run

CONSISTENT = ("deepsets", "sse", "umbc+bert", "umbc+anchors+bert")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"word{number}" for number in range(60)]
SMALL = {"deepsets": {}, "sse": {"num_slots": 5}, "umbc+bert": {"num_slots": 5}, "tobert": {"segment": 12, "heads": 2}}
SMALL |= {"longformer": {"window": 8}, "umbc+anchors+bert": {"num_slots": 5}}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A BERT of two layers, 16 wide, with a tokenizer of sixty words; its weights are random."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(SPECIAL) + len(WORDS), **sizes, max_position_embeddings=40, initializer_range=0.3)
    BertModel(config).save_pretrained(folder)
    places = {word: place for place, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(places, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {f"{word.strip('[]').lower()}_token": word for word in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return str(folder)


def law(number, rng, topic):
    """A law in EURLEX57K's layout; the words of its topic are more frequent in it."""

    def text(size):
        chosen = rng.choice(np.arange(60), size, p=np.where(np.arange(60) // 15 == topic, 30.0, 1.0) / 495)
        return " ".join(WORDS[word] for word in chosen)

    return {
        "celex_id": f"3{number:04d}",
        "header": "word0",
        "recitals": text(5),
        "main_body": [text(int(rng.integers(5, 30))), "word1 word2"],
        "attachments": "word3",
        "concepts": [f"c{topic}", "common"],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A hundred and twenty laws on four topics."""
    found = tmp_path_factory.mktemp("eurlex")
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("dev", 20), ("test", 40)):
        (found / split).mkdir()
        for number in range(count):
            (found / split / f"{number:03d}.json").write_text(json.dumps(law(number, rng, number % 4)))
    return str(found)


@pytest.fixture(scope="module")
def task(folder, bert, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SETSTREAM_DATA", str(tmp_path_factory.mktemp("cache")))
        found = Documents("eurlex", folder, bert)
        assert len(found.tokens.about) == 120
        yield found


def model(task, name, **options):
    torch.manual_seed(0)
    return task.build(name, **(SMALL[name] | options)).eval()


# -- corpora ----------------------------------------------------------------------------------------------------------


def test_eurlex_in_its_published_layout(folder, tmp_path):
    documents = list(eurlex(folder).read())
    splits = [document.split for document in documents]
    assert [splits.count(name) for name in ("train", "val", "test")] == [60, 20, 40]
    first = documents[0]
    lines = first.text.split("\n")  # the main body in its order, the recitals, the header; no attachments
    assert [line.split()[:2] for line in lines[1::2]] == [["word1", "word2"], ["word0"]]
    assert len(lines) == 4
    assert first.labels == ("c0", "common")
    plain = next(iter(eurlex(folder, inverted=False).read()))
    assert plain.text.split("\n") == [lines[3], lines[2], lines[0], lines[1]]
    with pytest.raises(DataError, match="there are none in train, dev, test"):
        eurlex(str(tmp_path))
    for name in ("train", "dev", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text("[]")
    with pytest.raises(DataError, match=r"a\.json: expected a mapping with a list of `concepts`"):
        list(eurlex(str(tmp_path)).read())
    (tmp_path / "train" / "a.json").write_text(json.dumps({"main_body": [["q"]], "concepts": []}))
    with pytest.raises(DataError, match=r"a\.json: expected texts, or lists of texts, in header, recitals"):
        list(eurlex(str(tmp_path)).read())


def test_a_document_that_changes_its_split_or_its_labels_is_read_again(tmp_path):
    for name in ("train", "dev", "test"):
        (tmp_path / name).mkdir()
        for stem in "ab":
            (tmp_path / name / f"{name}-{stem}.json").write_text("{}")
    before = eurlex(str(tmp_path)).stamp
    (tmp_path / "train" / "train-b.json").rename(tmp_path / "dev" / "train-b.json")
    assert eurlex(str(tmp_path)).stamp != before
    (tmp_path / "rfc1.txt").write_text("d e")
    (tmp_path / "rfc1.json").write_text(json.dumps({"keywords": ["tcp"]}))
    before = rfcs(str(tmp_path)).stamp
    assert rfcs(str(tmp_path)).stamp == before
    (tmp_path / "rfc1.json").write_text(json.dumps({"keywords": ["udp", "ip"]}))
    assert rfcs(str(tmp_path)).stamp != before


def test_rfcs_of_a_folder(tmp_path):
    for number, keywords in ((1, ["TCP", " Flow  control"]), (2, ["[--------|p]"]), (3, [])):
        (tmp_path / f"rfc{number}.json").write_text(json.dumps({"keywords": keywords}))
    (tmp_path / "rfc1.txt.gz").write_bytes(gzip.compress(b"a b c"))
    for number in (2, 3, 4):
        (tmp_path / f"rfc{number}.txt").write_text("d e")
    (tmp_path / "rfc-index.txt").write_text("not one")
    found = list(rfcs(str(tmp_path)).read())
    assert [(own.id, own.text, own.labels) for own in found] == [("rfc1", "a b c", ("flow control", "tcp"))]
    with pytest.raises(DataError, match="expected files rfcN.txt or rfcN.txt.gz; there are none"):
        list(rfcs(str(tmp_path / "none")).read())
    for content, message in (
        ("{", "cannot be read"),
        ("{}", "a list of `keywords`"),
        ('{"keywords": null}', "a list of `keywords`"),
    ):
        (tmp_path / "rfc1.json").write_text(content)
        with pytest.raises(DataError, match=rf"rfc1\.json: .*{message}"):
            list(rfcs(str(tmp_path)).read())


def test_pubmed_of_a_folder(tmp_path):
    def article(number, abstract, headings):
        mesh = "".join(f"<MeshHeading><DescriptorName>{name}</DescriptorName></MeshHeading>" for name in headings)
        return (
            f"<PubmedArticle><MedlineCitation><PMID>{number}</PMID><Article><ArticleTitle>On <i>it</i></ArticleTitle>{abstract}"
            f"</Article><MeshHeadingList>{mesh}</MeshHeadingList></MedlineCitation></PubmedArticle>"
        )

    two = "<Abstract><AbstractText>Why.</AbstractText><AbstractText>How.</AbstractText></Abstract>"
    text = article(1, two, ["Rats", "Animals"]) + article(2, "", ["Rats"]) + article(3, two, [])
    (tmp_path / "a.xml.gz").write_bytes(gzip.compress(f"<PubmedArticleSet>{text}</PubmedArticleSet>".encode()))
    found = list(pubmed(str(tmp_path)).read())
    assert [(own.id, own.text, own.labels) for own in found] == [("1", "On it\nWhy. How.", ("Animals", "Rats"))]
    with pytest.raises(DataError, match=r"expected \*\.xml\.gz files as PubMed"):
        pubmed(str(tmp_path / "none"))
    whole = (tmp_path / "a.xml.gz").read_bytes()
    for broken in (whole[:-20], gzip.compress(b"<PubmedArticleSet>"), b"no gzip at all"):
        (tmp_path / "a.xml.gz").write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.xml\.gz: cannot be read"):
            list(pubmed(str(tmp_path)).read())


def test_splits_by_order_are_seven_one_and_two_tenths():
    places = [by_order(place, 50) for place in range(50)]
    assert places == ["train"] * 35 + ["val"] * 5 + ["test"] * 10


@pytest.mark.slow
def test_reuters_is_what_it_is_known_to_be():
    documents = list(reuters(300).read())
    assert len(documents) == 1744
    assert abs(sum(len(own.labels) for own in documents) / 1744 - 2.6) < 0.05
    more = list(reuters(200).read())
    assert len(more) == 3366
    first = next(own for own in more if own.id == "1")
    assert first.labels == ("places/el-salvador", "places/uruguay", "places/usa", "topics/cocoa")
    assert first.text.startswith("BAHIA COCOA REVIEW\nShowers continued")
    assert [own.split for own in more] == [by_order(place, 3366) for place in range(3366)]  # they come by date


@pytest.mark.slow
def test_rfcs_are_what_they_are_known_to_be():
    documents = {own.id: own for own in rfcs().read()}
    assert len(documents) == 6893
    words = sum(len(own.text.split()) for own in documents.values()) / len(documents)
    assert abs(words - 7464.2) < 0.1
    assert documents["rfc1184"].labels == ("topt-line",)
    assert "Telnet Linemode Option" in documents["rfc1184"].text


@pytest.mark.slow
def test_pubmed_is_what_it_is_known_to_be():
    documents = list(pubmed().read())
    assert len(documents) == 14832
    assert sum(len(own.labels) for own in documents) == 157298


def test_splits_by_a_hash_stay_as_they_are():
    assert [by_hash(f"rfc{number}") for number in (791, 1034)] == ["train", "test"]


def test_tokens_are_made_once(task, bert, folder):
    from setstream.tasks.documents.language import tokenizer_of

    texts = [own.text for own in eurlex(folder).read()]
    for number in (0, 7, 119):
        ids = task.tokens.document(number)
        assert [(SPECIAL + WORDS)[own] for own in ids.tolist()] == texts[number].split()
    broken = eurlex(folder)
    again = tokens_of(type(broken)(broken.name, broken.stamp, lambda: pytest.fail("was read again")), tokenizer_of(bert))
    assert np.array_equal(again.ids, task.tokens.ids)
    found = corpus_sizes(task)
    assert found["labels"] == 5  # c0 to c3, and the common one
    assert found["labels per document"] == 2
    assert [found[name] for name in ("train", "val", "test", "without a kept label")] == [60, 20, 40, 0]
    assert found["words, mean"] == found["tokens, mean"]


def test_labels_need_enough_training_documents(folder, bert):
    rare = Documents("eurlex", folder, bert, label_minimum=16)
    assert rare.labels == ["common"]
    with pytest.raises(DataError, match="the most frequent has 60"):
        _ = Documents("eurlex", folder, bert, label_minimum=61).labels


def test_labels_that_no_training_document_carries_count_where_all_are_wanted(folder, bert, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "laws")
    file = tmp_path / "laws" / "test" / "000.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"concepts": ["unseen"]}))
    monkeypatch.setenv("SETSTREAM_DATA", str(tmp_path / "cache"))
    every, trained = (Documents("eurlex", str(tmp_path / "laws"), bert, label_minimum=least) for least in (None, 1))
    assert set(every.labels) - set(trained.labels) == {"unseen"}
    assert len(every.splits["test"]) == 40 == len(trained.splits["test"]) + 1
    assert int(every.splits["test"].labels[:, every.labels.index("unseen")].sum()) == 1
    own = every.build("deepsets").eval()
    assert torch.isfinite(every.logits(own, [every.tokens.document(0)])).all()


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_f1_is_that_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(50, 7, generator=generator) < 0.3
    scores = torch.rand(50, 7, generator=generator)
    truth[:, 6], scores[:, 6] = False, 0.0  # a label that is neither there nor predicted
    micro, macro = f1_scores(scores >= 0.6, truth)
    own = [f1_score(truth, scores >= 0.6, average=kind, zero_division=0) for kind in ("micro", "macro")]
    assert float(micro) == pytest.approx(own[0], abs=1e-12)
    assert float(macro) == pytest.approx(own[1], abs=1e-12)
    best = best_threshold(scores, truth)
    tried = [float(f1_scores(scores >= value, truth)[0]) for value in scores.unique()]
    assert float(f1_scores(scores >= best, truth)[0]) == pytest.approx(max(tried), abs=1e-12)


def test_equal_scores_are_taken_together():
    scores, truth = torch.tensor([[0.5, 0.5, 0.1]]), torch.tensor([[True, False, True]])
    assert best_threshold(scores, truth) < 0.1  # all three: F1 0.8; the two of 0.5: F1 0.5


def test_intervals_are_those_of_documents_drawn_anew():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(40, 5, generator=generator) < 0.4
    predicted = truth ^ (torch.rand(40, 5, generator=generator) < 0.2)
    found = intervals(predicted, truth, draws=300, seed=3)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.cat([torch.randint(40, (100, 40), generator=generator) for _ in range(3)])
    values = [[float(own) for own in f1_scores(predicted[index], truth[index])] for index in drawn]
    ends = torch.quantile(torch.tensor(values, dtype=torch.float64), torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
    expected = {
        "micro_f1_low": ends[0, 0],
        "micro_f1_high": ends[1, 0],
        "macro_f1_low": ends[0, 1],
        "macro_f1_high": ends[1, 1],
    }
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-6)
    assert intervals(predicted, truth, draws=101).keys() == found.keys()  # a last part of one draw


# -- language models --------------------------------------------------------------------------------------------------


def plain(bert):
    from transformers import BertModel

    return BertModel.from_pretrained(bert).eval()


def test_a_language_model_is_the_same_without_its_table(bert):
    ids = torch.tensor([[2, 10, 11, 12, 3]])
    outputs, pooled = Language(read_pretrained(bert).model).eval()(read_pretrained(bert).words[ids])
    expected = plain(bert)(ids)
    torch.testing.assert_close(outputs, expected.last_hidden_state)
    torch.testing.assert_close(pooled, expected.pooler_output)


def test_without_positions_order_is_unknown(bert):
    read = read_pretrained(bert)
    x, order = read.words[torch.arange(5, 15)].unsqueeze(0), torch.randperm(10)
    with torch.no_grad():
        knows = Language(read_pretrained(bert).model).eval()
        assert float((knows(x[:, order])[0] - knows(x)[0][:, order]).abs().max()) > 1e-3
        language = Language(read.model, positions=False).eval()
        torch.testing.assert_close(language(x[:, order])[0], language(x)[0][:, order])
    # The same as a BERT whose positions are all zero.
    other = plain(bert)
    torch.nn.init.zeros_(other.embeddings.position_embeddings.weight)
    torch.testing.assert_close(language(x)[0], other(inputs_embeds=x).last_hidden_state)


def test_framing_puts_sep_behind_the_last_word(bert):
    first, last = torch.full((2,), 7.0), torch.full((2,), 9.0)
    x = torch.arange(12.0).view(2, 3, 2)
    rows, mask = framed(x, torch.tensor([[True, True, False], [True, True, True]]), first, last)
    assert rows[..., 0].tolist() == [[7, 0, 2, 9, 0], [7, 6, 8, 10, 9]]
    assert mask.tolist() == [[True] * 4 + [False], [True] * 5]


@pytest.mark.parametrize("words", [1, 6, 17])
def test_a_longformer_is_its_bert_within_half_a_window(bert, words):
    """[CLS], words and [SEP] are at most 19: a window of 36 shows 18 to each side."""
    ids = torch.cat([torch.tensor([2]), torch.randint(5, 65, (words,)), torch.tensor([3])]).unsqueeze(0)
    longformer = Longformer(read_pretrained(bert).model, window=36).eval()
    with torch.no_grad():
        outputs, pooled = longformer(read_pretrained(bert).words[ids])
        expected = plain(bert)(ids)
    torch.testing.assert_close(outputs, expected.last_hidden_state, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled, expected.pooler_output, atol=1e-5, rtol=1e-5)


def test_a_longformer_sees_neighbours_and_reads_without_end(bert):
    """In one layer with a window of 8, a word that changes is seen by four to each side and by [CLS], and by no other."""
    longformer = Longformer(read_pretrained(bert).model, window=8).eval()
    longformer.model.encoder.layer = longformer.model.encoder.layer[:1]
    x = read_pretrained(bert).words[torch.randint(5, 65, (1, 100))]  # more than BERT's 40 positions
    changed = x.clone()
    changed[:, 90] += torch.randn(16)
    with torch.no_grad():
        moved = (longformer(changed)[0] - longformer(x)[0]).abs().amax((0, 2))
    assert (moved > 1e-5).nonzero().flatten().tolist() == [0, *range(86, 95)]


def test_only_berts_become_longformers(bert):
    with pytest.raises(ConfigurationError, match="window must be even"):
        Longformer(read_pretrained(bert).model, window=7)
    from transformers import DistilBertConfig, DistilBertModel

    other = DistilBertModel(DistilBertConfig(vocab_size=10, dim=8, n_layers=1, n_heads=2, hidden_dim=8))
    with pytest.raises(ConfigurationError, match="got a distilbert"):
        Longformer(other)


def test_another_kind_of_model_may_stand_where_bert_stands(bert, task, tmp_path):
    from transformers import AutoTokenizer, DistilBertConfig, DistilBertModel

    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "max_position_embeddings": 40}
    DistilBertModel(DistilBertConfig(vocab_size=65, **sizes)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    own = task.build("umbc+bert", bert=str(tmp_path), num_slots=4)
    assert task.logits(own.eval(), [task.tokens.document(0)]).shape == (1, 5)
    with pytest.raises(ConfigurationError, match="'none' is not a pretrained model"):
        task.build("deepsets", bert="none")


@pytest.mark.parametrize("kind", ["Electra", "Albert"])
@pytest.mark.parametrize("name", ["umbc+bert", "umbc+anchors+bert", "tobert"])
def test_word_vectors_may_be_narrower_than_outputs(bert, task, tmp_path, kind, name):
    """8 and 16 numbers; a document is read as it is alone, whatever the others' lengths."""
    import transformers

    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=65, **sizes, max_position_embeddings=40, initializer_range=0.3)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    own = model(task, name, bert=str(tmp_path))
    documents = [torch.arange(5, 5 + size) for size in (3, 50, 20)]
    together = task.logits(own, documents)
    alone = torch.cat([task.logits(own, [document]) for document in documents])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    ends = task.logits(own, [torch.cat([documents[1][:-1], torch.tensor([60])])])
    assert (ends - together[1]).abs().max() > 1e-4  # the last segment is read, too


def test_positions_that_a_model_does_not_use_are_not_counted(bert, task, tmp_path):
    from transformers import AutoTokenizer, RobertaConfig, RobertaModel, XLNetConfig, XLNetModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    RobertaModel(RobertaConfig(vocab_size=65, **sizes, max_position_embeddings=40, pad_token_id=1)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="1 to 36 words"):
        model(task, "tobert", bert=str(tmp_path), segment=37)
    own = model(task, "tobert", bert=str(tmp_path), segment=36)
    assert task.logits(own, [torch.arange(5, 60)]).shape == (1, 5)
    assert Language(XLNetModel(XLNetConfig(vocab_size=65, d_model=16, n_layer=1, n_head=2, d_inner=8))).longest is None


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_only_multiset_models_do_not_care_how_a_document_is_cut(task, name):
    own = model(task, name)
    assert own.encoder.pool.consistent == (name in CONSISTENT)
    encoder = own.encoder.double().eval()

    def streamed(document, size):
        state = None
        for chunk in document[None].split(size, dim=1):
            state = encoder.update(state, chunk, chunks="average")
        return encoder.finalize(state, chunks="average").detach()

    documents = [task.tokens.document(number) for number in (0, 1, 2)]
    codes = [torch.cat([streamed(document, size) for document in documents]) for size in (1, 7, 100)]
    apart = max(float((code - codes[0]).abs().max()) for code in codes) / float(codes[0].abs().max())
    assert (apart < 1e-12) == (name in CONSISTENT), apart


@pytest.mark.parametrize("name", MODELS)
def test_only_multiset_models_do_not_care_about_the_order_of_words(task, name):
    own, document = model(task, name).double(), task.tokens.document(3)
    one, other = (task.logits(own, [ids]) for ids in (document, document.flip(0)))
    assert (float((one - other).abs().max()) < 1e-9) == (name in CONSISTENT)


@pytest.mark.parametrize("name", MODELS)
def test_a_document_is_read_the_same_in_any_company(task, name):
    """Padding is masked: beside longer documents, each gets the logits it gets alone."""
    own = model(task, name).double()
    documents = [task.tokens.document(number) for number in range(6)]
    assert len({len(document) for document in documents}) > 3
    together = task.logits(own, documents)
    alone = torch.cat([task.logits(own, [document]) for document in documents])
    torch.testing.assert_close(together, alone, atol=1e-9, rtol=1e-9)


def test_cls_stands_before_the_slots_and_slots_have_no_order(task, bert):
    own = model(task, "umbc+bert")
    z = torch.randn(2, 5, 16)
    reader = own.head.bert
    torch.testing.assert_close(reader.first.detach(), read_pretrained(bert).words[2])  # [CLS]
    other = plain(bert)
    torch.nn.init.zeros_(other.embeddings.position_embeddings.weight)
    rows = torch.cat([read_pretrained(bert).words[2].expand(2, 1, -1), z], 1)
    with torch.no_grad():
        torch.testing.assert_close(reader(z), other(inputs_embeds=rows).pooler_output)
        torch.testing.assert_close(reader(z[:, torch.randperm(5)]), reader(z))
        assert float((reader(z + torch.randn(5, 16)) - reader(z)).abs().max()) > 1e-3
        mean = model(task, "umbc+bert", pooled="mean").head.bert
        torch.testing.assert_close(mean(z), other(inputs_embeds=rows).last_hidden_state[:, 1:].mean(1))
    assert not any("position" in name for name, _ in own.named_parameters())


def test_clusters_are_groups_of_like_words():
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(4, 32, generator=generator)
    words = centres.repeat_interleave(50, 0) + 0.5 * torch.randn(200, 32, generator=generator)
    kinds = word_clusters(words, 12)
    torch.testing.assert_close(kinds.norm(dim=1), torch.ones(12))
    assert torch.equal(kinds, word_clusters(words, 12))
    normed = torch.nn.functional.layer_norm(words, (32,))
    nearest = ((normed - normed.mean(0)) @ kinds.T).argmax(1).view(4, 50)
    groups = [set(own.tolist()) for own in nearest]
    assert len(set.union(*groups)) == sum(len(own) for own in groups), "no kind has words of two groups"
    assert word_clusters(words[:3], 8).shape == (8, 32)  # more slots than words


@pytest.mark.parametrize("activation", ["softmax", "slot-sigmoid"])
def test_anchored_slots_begin_as_means_of_like_words(task, bert, activation):
    """The formula of anchored.py, in full; slot-sigmoid: σ(l) over its sum over the slots."""
    own = model(task, "umbc+anchors+bert", activation=activation).double()
    document = task.tokens.document(0)
    words = torch.nn.functional.layer_norm(read_pretrained(bert).words.double(), (16,))[document]
    logits = 10 * word_clusters(read_pretrained(bert).words, 5).double() @ words.T / 4
    gates = logits.sigmoid()
    weights = logits.softmax(-1) if activation == "softmax" else gates / gates.sum(0)
    expected = torch.nn.functional.layer_norm(weights @ words, (16,))
    torch.testing.assert_close(own.encoder([document])[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "usual"), [("umbc+bert", 2), ("umbc+anchors+bert", 0)])
def test_depth_is_the_number_of_layers_of_phi(task, name, usual):
    for options, expected in (({}, usual), ({"depth": 3}, 3), ({"depth": 0}, 0)):
        phi = model(task, name, **options).encoder.phi
        assert sum(isinstance(layer, torch.nn.Linear) for layer in phi.modules()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_models_begin_by_knowing_how_often_labels_come(task, name):
    own = model(task, name)
    assert task.labels == ["c0", "c1", "c2", "c3", "common"]
    rates = torch.tensor([15.5] * 4 + [60.5]) / 61  # half a document more has, and half a document more has not
    weights = [value for value in own.head.parameters() if len(value) == 5 and value.dim() == 2]
    torch.nn.init.zeros_(weights[-1])
    torch.testing.assert_close(own([task.tokens.document(0)])[0].sigmoid(), rates)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_saved_and_opened_again(task, name, tmp_path):
    own = model(task, name)
    own.save_pretrained(tmp_path)
    document = [task.tokens.document(0)]
    assert torch.equal(own(document), ss.SetModel.from_pretrained(tmp_path).eval()(document))


def test_layers_begin_as_asked_for(task):
    torch.manual_seed(0)
    plain, wide = (task.build("deepsets", init=init) for init in ("torch", "he"))
    for part in ("encoder.phi.layers.0", "head.0.0"):
        assert float(wide.get_submodule(part).weight.detach().std()) == pytest.approx((2 / 16) ** 0.5, rel=0.2)
        assert float(plain.get_submodule(part).weight.detach().std()) < 0.2
    torch.manual_seed(0)
    one, other = (model(task, "umbc+bert", init=init).head.state_dict() for init in ("torch", "he"))
    assert all(torch.equal(one[name], other[name]) for name in one if name.startswith("bert")), "what is pretrained stays"


def test_normalising_changes_nothing_behind_the_layer_norm(task):
    """slot-sigmoid as a sum or as a mean differ by one factor for each slot: a layer norm (eps 1e-5) removes it."""
    documents = [task.tokens.document(number) for number in (0, 1)]
    one, other = (model(task, "umbc+bert", normalise=own).double() for own in (True, False))
    for pool in (one.encoder.pool, other.encoder.pool):
        pool.norm.eps = 1e-30
    torch.testing.assert_close(one(documents), other(documents), atol=1e-9, rtol=1e-9)


def test_sse_without_normalising_is_a_sum_of_words(task):
    own = model(task, "sse", normalise=False).double()
    document = task.tokens.document(0)
    pool = own.encoder.pool.first
    expected = pool.value(own.encoder.features(document)).sum(0) / 5
    torch.testing.assert_close(own.encoder([document])[0], expected)


def test_tobert_reads_segments(task, bert):
    """One segment: BERT's pooled [CLS], then the transformer on a sequence of one."""
    own = model(task, "tobert", segment=30)
    reader = own.encoder.pool.module
    ids = torch.randint(5, 65, (20,))
    vector = plain(bert)(torch.cat([torch.tensor([2]), ids, torch.tensor([3])]).unsqueeze(0)).pooler_output
    place = torch.tensor([0.0, 1.0]).repeat(8)
    torch.testing.assert_close(own.encoder([ids]), reader.over((vector + place).unsqueeze(1)).squeeze(1))
    with pytest.raises(ConfigurationError, match="1 to 38 words"):
        model(task, "tobert", segment=39)


@pytest.mark.parametrize("name", ["deepsets", "tobert"])
def test_no_more_than_the_longest_is_read(task, folder, bert, name, monkeypatch):
    short = Documents("eurlex", folder, bert, longest=10)
    monkeypatch.setattr(short, "tokens", task.tokens)
    assert torch.equal(short.lengths("test"), task.lengths("test"))  # what there is, not what is read
    assert [len(own) for own in short.batch(0, 4, torch.Generator())["words"]] == [10] * 4
    own, rows = model(task, name).double(), task.splits["test"].index[:3]
    read, _ = short.probabilities(own, "test")
    expected = task.logits(own, [task.tokens.document(row)[:10] for row in rows]).sigmoid()
    torch.testing.assert_close(read[:3], expected.to(read.dtype))


def test_words_that_come_again_are_computed_once_and_count_each_time(task):
    phi = task.build("umbc+bert", num_slots=4).encoder.phi.double()
    ids = torch.tensor([3, 7, 3, 3, 11, 7])
    seen = []
    phi.norm.register_forward_hook(lambda module, given, found: seen.append(len(found)))
    upstream = torch.randn(6, phi.words.embedding_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = phi(ids)
    (found * upstream).sum().backward()
    table = phi.words.weight.grad.clone()
    phi.zero_grad()
    one_by_one = torch.cat([phi(word[None]) for word in ids])
    (one_by_one * upstream).sum().backward()
    assert seen[0] == 3
    torch.testing.assert_close(found, one_by_one)
    torch.testing.assert_close(table, phi.words.weight.grad)


def test_gradients_are_exact_in_chunks(task):
    own = model(task, "umbc+bert").train()
    ss.testing.check_exact_gradient(own.encoder, [task.tokens.document(number) for number in (0, 1)], chunk_size=7)


@pytest.mark.parametrize("name", CONSISTENT)
def test_no_more_than_a_piece_of_a_document_is_in_memory(task, name):
    """phi sees 2^22 numbers at a time, 4 for each of the 16 of a word and its id, or 100 words with a graph."""
    own, seen = model(task, name).train(), []
    own.encoder.phi.register_forward_hook(lambda module, given, found: seen.append((len(found), found.requires_grad)))
    long = torch.randint(5, 65, (150_000,))
    task.loss(own, {"words": [long], "labels": torch.zeros(1, 5)}, Encode("unbiased", 100)).backward()
    assert sum(size for size, graph in seen if not graph) >= 149_900
    assert max(size for size, graph in seen if not graph) <= 2**22 // 65
    assert [size for size, graph in seen if graph] == [100]


def test_stage_one_trains_all_but_bert(task):
    own = model(task, "umbc+bert", words="frozen")
    freeze(own, ["head.bert"])
    train_mode(own, ["head.bert"])
    before = {name: value.clone() for name, value in own.state_dict().items()}
    optimizer = torch.optim.AdamW([value for value in own.parameters() if value.requires_grad], 1e-2)
    task.loss(own, task.batch(0, 4, torch.Generator()), Encode("unbiased", chunk_size=7)).backward()
    optimizer.step()
    changed = {name for name, value in own.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not name.startswith("head.bert") and name != "encoder.phi.words.weight"}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_through_the_trainer(task, folder, bert, tmp_path, name):
    options = {"corpus": "eurlex", "folder": folder, "bert": bert}
    gradient = {"gradient": "unbiased", "chunk_size": 10} if name in CONSISTENT else {"gradient": "full"}
    rate = 1e-2 if name in ("deepsets", "sse") else 3e-3
    config = TrainConfig(
        *("documents", name, options, SMALL[name]),
        **({"steps": 120, "batch": 8, "lr": rate, "schedule": "constant", "tensorboard": False, "threads": 1} | gradient),
    )
    result = Trainer(task, config, tmp_path, shown=False).run()
    metrics = result.metrics
    assert set(metrics) == {"threshold", *(f"micro_f1_fifth_{number}" for number in range(1, 6))} | {
        f"{kind}_f1{tuned}{end}" for kind in ("micro", "macro") for tuned in ("", "_tuned") for end in ("", "_low", "_high")
    }
    # Who knows no more than how frequent labels are loses 4 H(1/4) = 2.25 nats a document.
    scores, truth = task.probabilities(SavedRun(tmp_path, config).model(task), "test")
    assert float(torch.nn.functional.binary_cross_entropy(scores, truth.float(), reduction="sum")) / len(truth) < 2.1
    assert metrics["micro_f1_low"] <= metrics["micro_f1"] <= metrics["micro_f1_high"]


def test_models_that_need_order_refuse_chunks(task):
    with pytest.raises(ConfigurationError, match="gradient = full, not unbiased"):
        task.loss(model(task, "tobert"), task.batch(0, 2, torch.Generator()), Encode("unbiased", 7))
    with pytest.raises(ConfigurationError, match="parallel = data, not set"):
        task.loss(model(task, "tobert"), task.batch(0, 2, torch.Generator()), Encode("full", group=object()))


def test_importance_keeps_no_features_of_cheap_layers(task):
    """The same gradient from the same draw, and nothing kept but what the head needs."""
    own, batch = model(task, "umbc+anchors+bert").train(), task.batch(0, 4, torch.Generator())
    found, kept = {}, {}
    for features in ("cache", "recompute"):
        encode = Encode("importance", chunk_size=7, features=features)
        kept[features] = kept_bytes(lambda encode=encode: task.loss(own, batch, encode), own.parameters())
        own.zero_grad()
        torch.manual_seed(3)
        task.loss(own, batch, encode).backward()
        found[features] = {name: value.grad for name, value in own.named_parameters() if value.grad is not None}
    torch.testing.assert_close(found["recompute"], found["cache"])
    assert kept["cache"] == kept["recompute"]


def test_every_document_comes_once_an_epoch(task):
    words = [tuple(own.tolist()) for step in range(15) for own in task.batch(step, 4, torch.Generator())["words"]]
    assert sorted(words) == sorted(tuple(task.tokens.document(index).tolist()) for index in task.splits["train"].index)
    assert [tuple(own.tolist()) for own in task.batch(15, 4, torch.Generator())["words"]] != words[:4]


def test_the_order_of_documents_follows_from_the_seed(task, tmp_path):
    def first(seed: int) -> list[list[int]]:
        config = TrainConfig("documents", "deepsets", model_options=SMALL["deepsets"], seed=seed, steps=1, tensorboard=False)
        trainer = Trainer(task, config, tmp_path / str(seed), shown=False)
        return [own.tolist() for own in trainer.task.batch(0, 8, torch.Generator())["words"]]

    assert first(0) == first(0) != first(1)


def test_f1_by_length_is_that_of_fifths_of_the_documents(task):
    own, fifths, lengths = model(task, "deepsets"), task.fifths(), task.lengths("test")
    assert torch.equal(torch.cat(fifths).sort().values, torch.arange(40))
    assert all(lengths[one].max() <= lengths[other].min() for one, other in pairwise(fifths))
    found, (scores, truth) = task.evaluate(own), task.probabilities(own, "test")
    expected = [float(f1_scores(scores[rows] >= 0.5, truth[rows])[0]) for rows in fifths]
    assert [found[f"micro_f1_fifth_{number}"] for number in range(1, 6)] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "books"}, "unknown corpus 'books': choose one of reuters"),
        ({"corpus": "eurlex"}, "give task.folder=PATH"),
        ({"folder": "x"}, "remove task.folder"),
        ({"inverted": False}, "an option of eurlex only; remove it for reuters"),
        *(({name: 0}, f"{name} must be at least 1; got 0") for name in ("longest", "test_chunk", "quick")),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Documents(**options)


def test_the_command_tells_of_a_corpus_and_of_errors(folder, bert, tmp_path):
    def told(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "benchmarks/documents_corpora.py", *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"SETSTREAM_DATA": str(tmp_path)}
        )

    found = told(f"eurlex={folder}", "--bert", bert)
    assert [line.split() for line in found.stdout.splitlines()[:2]] == [["eurlex"], ["documents", "120"]]
    assert "CORPUS" in told("--help").stdout
    wrong = told("books")
    assert (wrong.returncode, wrong.stderr.splitlines()[0][:29]) == (1, "error: unknown corpus 'books'")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("umbc+bert", {"num_slots": 40}, r"at most 39 slots; got num_slots = 40"),
        ("umbc+bert", {"pooled": "max"}, "unknown pool 'max'"),
        ("deepsets", {"words": "gone"}, "learned or frozen"),
        ("deepsets", {"init": "zeros"}, "init is torch or he"),
        ("umbc+anchors+bert", {"depth": -1}, "must be at least 0; got -1"),
        ("umbc+anchors+bert", {"slot_dim": 3}, "anchors of 16 numbers are projected without a bias"),
    ],
)
def test_bad_models_are_refused(task, name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        model(task, name, **options)


def a_corpus(folder, fewest_words):
    documents = [Document(str(n), "word1 word2 " * n, (f"l{n % 2}",), by_order(n, 10)) for n in range(10)]
    return corpus_of("mine", f"{folder}", lambda: documents, fewest_words)


def test_a_corpus_of_ones_own_is_named_again_where_a_file_names_it(bert, tmp_path):
    place = f"{__name__}:a_corpus"
    assert Documents(place, "x", bert, fewest_words=2).lengths("train").tolist() == [2, 4, 6, 8, 10, 12]
    options = {"task": "documents", "model": "deepsets", "task_options": {"corpus": place}}
    (tmp_path / "config.json").write_text(json.dumps(options))
    with pytest.raises(ConfigurationError, match=f"trust {place}"):
        SavedRun(tmp_path, read_run(tmp_path)).task()
    assert SavedRun(tmp_path, read_run(tmp_path), [place]).task().corpus == place
    with pytest.raises(ConfigurationError, match="unknown corpus 'mine': choose one of reuters, .* or give your own"):
        Documents("mine")
