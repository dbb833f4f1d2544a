"""The blind programs and the truth of each: what is planted where, and what a step gains without it.

The programs were written by someone who had not read the rules. Each is a script of this folder or of a folder of its
own, with `--mended` for the twin without the fault. The fault's lines end with MARK.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
GAINS: Final = FOLDER / "gains.json"
ADVICE: Final = FOLDER / "advice.json"
ALARMS: Final = FOLDER / "alarms.json"
MARK: Final = "# planted"
_NUMBER: Final = re.compile(r"[\d.,]*\d")


class Kind(Enum):
    """Classes of faults; the value is the class of the published taxonomy of low utilisation that it belongs to."""

    PREPARED_PER_SAMPLE = "data operations: preprocessed anew for each sample"
    CONVERTED_PER_SAMPLE = "data operations: converted sample by sample"
    READ_AGAIN = "data operations: read again"
    COLLATED_BY_HAND = "data operations: batches put together in Python"
    STATISTIC_AGAIN = "data operations: a constant of the data computed again"
    ITERATOR_AGAIN = "data operations: the loader's iterator made anew in each step"
    WIDE_TYPE = "data operations: a wider type than needed"
    CONSTANT_AGAIN = "model: a constant computed again"
    GRADIENT_UNUSED = "model: gradients that nobody uses"
    GRAPH_AGAIN = "model: the same graph run several times"
    PREFIX_AGAIN = "model: decoding without a cache"
    LOOP = "model: a Python loop over what is one operation"
    ALGEBRA = "model: more arithmetic than the result needs"
    MODEL_AGAIN = "loop: the model made or copied anew in each step"
    EVALUATED_TOO_OFTEN = "loop: evaluated or logged too often"
    RESULT_AGAIN = "loop: the same result computed again in each step"


@dataclass(frozen=True)
class Gain:
    """What a stopwatch says of both variants: milliseconds of a step, medians of `runs`.

    Attributes:
        fault_ms, mended_ms: by the clock.
        fault_cpu_ms, mended_cpu_ms: that the process was given on its processors.
        load: of the machine when it was measured.
    """

    fault_ms: float
    mended_ms: float
    fault_cpu_ms: float
    mended_cpu_ms: float
    runs: int
    load: float

    @property
    def share(self) -> float:
        """Of the faulty step's processor time, which is its time on a quiet machine."""
        return 1 - self.mended_cpu_ms / self.fault_cpu_ms

    @property
    def clock_share(self) -> float:
        """The same by the clock."""
        return 1 - self.mended_ms / self.fault_ms


@dataclass(frozen=True)
class Advice:
    """A judgement of what a rule advises for a program, by someone who knows its fault.

    Attributes:
        rule: that advised it.
        advice: its words; other numbers in them make no difference.
        leads_to_the_fix: whether one who follows it arrives at the change.
        reason: why, in a sentence.
    """

    rule: str
    advice: str
    leads_to_the_fix: bool
    reason: str

    def is_about(self, rule: str, advice: str) -> bool:
        """Whether these are the rule and the words that were judged."""
        return rule == self.rule and _NUMBER.sub("#", advice) == _NUMBER.sub("#", self.advice)


@dataclass(frozen=True)
class Alarm:
    """What a stopwatch says of a promise made on a variant without its fault, after the advised change.

    Both variants ran in pairs, in turns, without a profiler. Of all pairs, those in which other programs disturbed
    them least count.

    Attributes:
        promised: share of the step.
        gained: share of the twin's step, the median of the pairs.
        least, most: of the pairs.
        measured: "processor" for the time that the process was given, as of a `Gain`; "clock" where the change starts
            workers, in pairs that had a processor free for them.
        pairs: number of them.
        verdict: "confirmed", "partly" or "refuted", as `verdict_of` says.
        change: what was changed, in a sentence.
    """

    promised: float
    gained: float
    least: float
    most: float
    measured: str
    pairs: int
    verdict: str
    change: str

    def verdict_of(self, promised: float) -> str:
        """Whether the gain is at least half of such a promise, at least a quarter, or less."""
        kept = self.gained / promised
        return "confirmed" if kept >= 0.5 else "partly" if kept >= 0.25 else "refuted"


@dataclass(frozen=True)
class Truth:
    """What is planted in one blind program.

    Attributes:
        script: the program's file, relative to FOLDER.
        kind: class of the fault.
        cause: what takes the time, in a sentence.
        change: what to do about it, in a sentence.
        half: 1 for the programs that were there before any diagnosis was run on one, 2 for the later ones, 3 for those
            written when the rules had been changed with the first 40 in view.
        step_function: whose calls are the program's steps; None where an optimizer's steps are.
    """

    script: str
    kind: Kind
    cause: str
    change: str
    half: int = 1
    step_function: str | None = None

    @property
    def path(self) -> Path:
        """The program's file."""
        return FOLDER / self.script

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the program."""
        return (self.path,) if self.path.parent == FOLDER else tuple(sorted(self.path.parent.glob("*.py")))

    def lines(self) -> frozenset[tuple[str, int]]:
        """Names of files and numbers of lines that are the fault's."""
        return frozenset((file.name, number) for file in self.files for number in _marked(file.read_text()))

    def is_at(self, file: str, line: int) -> bool:
        """Whether it is a planted line, or in a function (but main) that holds one or that such a line calls."""
        return any(Path(file).name == name and begin <= line <= end for name, begin, end in self._places())

    def _places(self) -> set[tuple[str, int, int]]:
        """Files' names with first and last lines."""
        functions = [one for file in self.files for one in _functions(file)]
        marks = self.lines()
        called = {
            name for file in self.files for name in _called(file, {line for own, line in marks if own == file.name})
        }
        holding = [
            one
            for one in functions
            if one.name != "main" and any(one.file == own and one.begin <= line <= one.end for own, line in marks)
        ]
        reached: set[_Function] = set()
        while fresh := [one for one in functions if one.name in called and one not in reached]:
            reached.update(fresh)
            called |= {name for one in fresh for name in one.calls}
        places = {(one.file, one.begin, one.end) for one in [*holding, *reached]}
        return places | {(own, line, line) for own, line in marks}


def truth(name: str) -> Truth:
    """Of the program of that name."""
    return TRUTHS[name]


def gains() -> dict[str, Gain]:
    """What was measured, by the programs' names."""
    return {name: Gain(**row) for name, row in json.loads(GAINS.read_text()).items()} if GAINS.exists() else {}


def alarms() -> dict[str, dict[str, Alarm]]:
    """The promises that were measured, by the programs' names and the rules."""
    rows = json.loads(ALARMS.read_text())
    return {name: {rule: Alarm(**row) for rule, row in of_rules.items()} for name, of_rules in rows.items()}


def judged(name: str, rule: str, advice: str) -> Advice | None:
    """The judgement of this advice for a program; None where nobody judged these words."""
    rows = json.loads(ADVICE.read_text()).get(name, [])
    return next((each for row in rows if (each := Advice(**row)).is_about(rule, advice)), None)


def _marked(text: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]


@dataclass(frozen=True)
class _Function:
    file: str
    name: str
    begin: int
    end: int
    calls: frozenset[str]


def _functions(path: Path) -> list[_Function]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [
        _Function(path.name, node.name, node.lineno, node.end_lineno or node.lineno, frozenset(_names(node)))
        for node in nodes
    ]


def _called(path: Path, lines: set[int]) -> set[str]:
    """Names of what these lines call."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {name for node in calls if node.lineno in lines for name in _names(node)}


def _names(node: ast.AST) -> set[str]:
    """Names of what is called below a node."""
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in functions
        if hasattr(one, "attr") or hasattr(one, "id")
    }


TRUTHS: Final = {
    "sentiment": Truth(
        "sentiment.py",
        Kind.PREPARED_PER_SAMPLE,
        "The data set's __getitem__ runs a tokenizer in plain Python on the review each time it is asked for.",
        "Tokenize the reviews once, before the training, and index the tensor.",
    ),
    "churn": Truth(
        "churn/train.py",
        Kind.CONVERTED_PER_SAMPLE,
        "Each sample takes a row of a data frame as a dictionary, standardises its numbers one by one and makes three "
        "tensors.",
        "Turn the data frame's columns into tensors once, and take whole batches of them by index.",
    ),
    "thumbnails": Truth(
        "thumbnails.py",
        Kind.PREPARED_PER_SAMPLE,
        "Every photo is decoded at full size and resized in __getitem__, in each epoch, in the training process.",
        "Decode and resize each photo once and keep the small images, or do it in loader workers.",
    ),
    "keyword_spotting": Truth(
        "keyword_spotting.py",
        Kind.STATISTIC_AGAIN,
        "The mel filter bank, which never changes, is computed in Python loops for each sample.",
        "Compute the filter bank once and keep it.",
    ),
    "tagger": Truth(
        "tagger.py",
        Kind.COLLATED_BY_HAND,
        "The collate function writes tokens, tags and mask into tensors element by element.",
        "Make a tensor of each sentence and pad with pad_sequence; compare positions with lengths for the mask.",
    ),
    "load_forecast": Truth(
        "load_forecast.py",
        Kind.CONVERTED_PER_SAMPLE,
        "The series is a list of lists of Python numbers, and each sample turns its windows of it into tensors.",
        "Convert the series to a tensor once and slice it.",
    ),
    "shards": Truth(
        "shards.py",
        Kind.READ_AGAIN,
        "Each sample opens and decompresses the whole shard that holds it.",
        "Read each shard once and keep it in memory.",
    ),
    "bpr": Truth(
        "bpr.py",
        Kind.PREPARED_PER_SAMPLE,
        "Negative items are sampled one by one in __getitem__, each looked for in a list of what the user bought.",
        "Keep what a user bought as a set, or sample a batch's negatives as one tensor.",
    ),
    "dqn": Truth(
        "dqn.py",
        Kind.CONVERTED_PER_SAMPLE,
        "The replay buffer makes five tensors for each sampled transition and stacks them.",
        "Keep the transitions in tensors and index them with the batch's positions.",
    ),
    "sensors": Truth(
        "sensors.py",
        Kind.STATISTIC_AGAIN,
        "Mean and standard deviation of the whole data set are computed again for each sample.",
        "Compute them once, when the data set is made.",
    ),
    "translate": Truth(
        "translate/train.py",
        Kind.CONSTANT_AGAIN,
        "The positional encodings are computed in Python loops in every forward pass, twice.",
        "Compute the table once and keep it in a buffer.",
    ),
    "citations": Truth(
        "citations.py",
        Kind.CONSTANT_AGAIN,
        "The adjacency matrix, which never changes, is normalised in each forward pass.",
        "Normalise it once before the training.",
    ),
    "transfer": Truth(
        "transfer/finetune.py",
        Kind.GRADIENT_UNUSED,
        "The backward pass goes through the backbone, for gradients of weights that no optimizer updates.",
        "Set requires_grad to False for the backbone, or run it under torch.no_grad().",
    ),
    "chat": Truth(
        "chat/serve.py",
        Kind.PREFIX_AGAIN,
        "Each new token runs the model on all tokens so far.",
        "Keep keys and values of the tokens so far and run the model on the new token only.",
        step_function="handle",
    ),
    "simclr": Truth(
        "simclr.py",
        Kind.LOOP,
        "The contrastive loss computes the similarity of each pair of embeddings as a dot product of its own.",
        "Compute all similarities as one matrix product.",
    ),
    "lightning_digits": Truth(
        "lightning_digits.py",
        Kind.EVALUATED_TOO_OFTEN,
        "The trainer validates on the whole validation set after every fourth training batch.",
        "Validate once in an epoch, or on fewer batches.",
    ),
    "dcgan": Truth(
        "dcgan.py",
        Kind.GRADIENT_UNUSED,
        "The discriminator's loss is differentiated through the generator that made the images; these gradients are "
        "thrown away.",
        "Detach the generated images before the discriminator sees them.",
    ),
    "lora": Truth(
        "lora/finetune.py",
        Kind.ALGEBRA,
        "Each adapter multiplies its two small matrices to a full weight and adds it to the frozen one in each forward "
        "pass, and the backward pass computes a gradient of that full weight.",
        "Multiply the input by the two small matrices one after the other.",
    ),
    "diffusion": Truth(
        "diffusion.py",
        Kind.CONSTANT_AGAIN,
        "The noise schedule is computed in a Python loop over all time steps for each batch.",
        "Compute the schedule once and index it.",
    ),
    "vqvae": Truth(
        "vqvae.py",
        Kind.ALGEBRA,
        "Distances to the codes are computed from a broadcast difference of positions x codes x width numbers.",
        "Expand the square: distances from one matrix product and the codes' norms (or torch.cdist).",
    ),
    "ner": Truth(
        "ner/train.py",
        Kind.PREPARED_PER_SAMPLE,
        "Each word of each sample is looked for in the list of all words, twice.",
        "Keep a dictionary from word to number, or number the corpus once.",
        half=2,
    ),
    "clicks": Truth(
        "clicks.py",
        Kind.READ_AGAIN,
        "Each sample opens the file and reads all lines before its own.",
        "Keep the file open and go to the line by its offset, or read the file once.",
        half=2,
    ),
    "xrays": Truth(
        "xrays.py",
        Kind.PREPARED_PER_SAMPLE,
        "The augmentation draws a random number for each pixel in a Python loop.",
        "Draw the numbers of a whole image at once, as an array.",
        half=2,
    ),
    "molecules": Truth(
        "molecules/train.py",
        Kind.COLLATED_BY_HAND,
        "The collate function writes atoms and bonds into tensors element by element.",
        "Collect the indices of the batch and fill each tensor with one indexed assignment.",
        half=2,
    ),
    "landcover": Truth(
        "landcover.py",
        Kind.PREPARED_PER_SAMPLE,
        "Each pixel's color in a mask is looked up in a dictionary, in two Python loops.",
        "Translate the colors of a whole mask with array operations, or convert the masks once.",
        half=2,
    ),
    "plates": Truth(
        "plates.py",
        Kind.ITERATOR_AGAIN,
        "next(iter(loader)) makes a new iterator in each step, which shuffles all indices for one batch.",
        "Keep the iterator between steps.",
        half=2,
    ),
    "houses": Truth(
        "houses.py",
        Kind.WIDE_TYPE,
        "NumPy's float64 was kept and the model turned to double precision to fit it.",
        "Convert the data to float32 and leave the model as it is.",
        half=2,
    ),
    "species": Truth(
        "species.py",
        Kind.STATISTIC_AGAIN,
        "The loss counts the labels of the whole data set in each step, to weigh the classes.",
        "Compute the weights once.",
        half=2,
    ),
    "bucketed": Truth(
        "bucketed.py",
        Kind.STATISTIC_AGAIN,
        "The sampler sorts the whole corpus by length for each batch.",
        "Sort it once.",
        half=2,
    ),
    "tickets": Truth(
        "tickets.py",
        Kind.PREPARED_PER_SAMPLE,
        "The data set's __getitem__ calls the tokenizer of Transformers for each text, each time it is asked for.",
        "Tokenize all texts in one call before the training, or a batch at a time in the collate function.",
        half=2,
    ),
    "envs": Truth(
        "envs.py",
        Kind.LOOP,
        "The policy is asked for each environment by itself, with a batch of one.",
        "Stack the observations and ask the policy once for all environments.",
        half=2,
    ),
    "mean_teacher": Truth(
        "mean_teacher.py",
        Kind.MODEL_AGAIN,
        "The averaged weights are made anew in each step: the model's state is deep-copied, averaged tensor by tensor "
        "and loaded.",
        "Average the parameters in place, all at once with torch._foreach_lerp_ (or torch.optim.swa_utils).",
        half=2,
    ),
    "distill": Truth(
        "distill/train.py",
        Kind.GRADIENT_UNUSED,
        "The teacher runs with gradients, and the backward pass goes through it, for weights that nothing updates.",
        "Run the teacher under torch.no_grad().",
        half=2,
    ),
    "reinforce": Truth(
        "reinforce.py",
        Kind.LOOP,
        "Discounted returns are summed up anew for each time, in Python loops over all later times.",
        "Go from the last reward to the first and add, for all episodes at once.",
        half=2,
    ),
    "faces": Truth(
        "faces.py",
        Kind.GRAPH_AGAIN,
        "Each task's loss is differentiated by itself with retain_graph, so that the backward pass of the shared "
        "network runs three times.",
        "Add the losses and call backward once.",
        half=2,
    ),
    "trainer_gpt2": Truth(
        "trainer_gpt2.py",
        Kind.EVALUATED_TOO_OFTEN,
        "The Trainer evaluates the whole evaluation set after every second step.",
        "Evaluate less often (eval_steps).",
        half=2,
    ),
    "embedder_service": Truth(
        "embedder_service.py",
        Kind.MODEL_AGAIN,
        "Each request makes the model and loads its weights from the file.",
        "Load the model once, when the service starts.",
        half=2,
        step_function="answer",
    ),
    "char_lm": Truth(
        "char_lm.py",
        Kind.ALGEBRA,
        "Words become vectors by a product of a one-hot matrix with the weights.",
        "Index the weights: F.embedding.",
        half=2,
    ),
    "vit": Truth(
        "vit.py",
        Kind.GRAPH_AGAIN,
        "Gradient checkpointing runs the forward pass of each block again in the backward pass, though there is memory "
        "for the activations.",
        "Call the blocks without checkpoint().",
        half=2,
    ),
    "fraud": Truth(
        "fraud.py",
        Kind.EVALUATED_TOO_OFTEN,
        "The area under the curve of the last 20,000 scores is computed in a Python loop in every step, and only every "
        "fortieth is reported.",
        "Compute it when it is reported.",
        half=2,
    ),
    "sessions": Truth(
        "sessions.py",
        Kind.PREPARED_PER_SAMPLE,
        "The data set's __getitem__ parses a visit's JSON, of which it needs little, each time it is asked for.",
        "Parse the file once and keep the numbers in tensors.",
        half=3,
    ),
    "retail": Truth(
        "retail.py",
        Kind.PREPARED_PER_SAMPLE,
        "Each sample compares all rows of the table with its store and days to find its 63 rows.",
        "Sort the table by store and day once and slice it.",
        half=3,
    ),
    "promoters": Truth(
        "promoters.py",
        Kind.STATISTIC_AGAIN,
        "Each sample joins the lines of the whole chromosome to one string, of which it takes 400 letters.",
        "Join the lines once, when the file is read.",
        half=3,
    ),
    "pointcloud": Truth(
        "pointcloud.py",
        Kind.PREPARED_PER_SAMPLE,
        "np.random.choice without replacement shuffles all points of a scan to choose 512 of them.",
        "Draw with Generator.choice(..., replace=False, shuffle=False), or draw indices and accept repeats.",
        half=3,
    ),
    "ecg": Truth(
        "ecg.py",
        Kind.CONVERTED_PER_SAMPLE,
        "The collate function makes a tensor of a list of arrays, which is converted number by number.",
        "Stack the arrays with NumPy first, then make the tensor.",
        half=3,
    ),
    "ct_slices": Truth(
        "ct_slices.py",
        Kind.STATISTIC_AGAIN,
        "Each sample converts and clips the whole volume and takes one slice of the result.",
        "Take the slice first, or window each volume once.",
        half=3,
    ),
    "expressions": Truth(
        "expressions/train.py",
        Kind.PREPARED_PER_SAMPLE,
        "Each sample splits a string of 2,304 numbers and converts them one by one.",
        "Parse the images once, when the file is read, and keep them as an array.",
        half=3,
    ),
    "detector": Truth(
        "detector/train.py",
        Kind.PREPARED_PER_SAMPLE,
        "Each sample matches anchors and boxes in two Python loops, with a function call for each pair.",
        "Compute the overlap of all pairs at once with array operations, and keep the matches of each image.",
        half=3,
    ),
    "playlists": Truth(
        "playlists.py",
        Kind.STATISTIC_AGAIN,
        "np.random.choice with probabilities adds up the popularity of all songs again for each sample.",
        "Add it up once and draw the songs of a batch with searchsorted, or with torch.multinomial.",
        half=3,
    ),
    "mlm": Truth(
        "mlm.py",
        Kind.ALGEBRA,
        "The scores of the whole vocabulary are computed for all words, though the loss needs only the masked ones'.",
        "Select the states of the masked words before the vocabulary layer.",
        half=3,
    ),
    "storyteller": Truth(
        "storyteller.py",
        Kind.LOOP,
        "Text is generated for one opening at a time.",
        "Pad the openings on the left and generate for the whole batch.",
        half=3,
        step_function="tell",
    ),
    "longdoc": Truth(
        "longdoc/train.py",
        Kind.CONSTANT_AGAIN,
        "Each layer makes its attention mask, which never changes, in Python loops in each forward pass.",
        "Make the mask of a length once and keep it.",
        half=3,
    ),
    "superres": Truth(
        "superres.py",
        Kind.ALGEBRA,
        "Convolutions copy all patches with unfold, nine times the image, and multiply them with the weights.",
        "Call F.conv2d with the computed weights.",
        half=3,
    ),
    "captions": Truth(
        "captions/caption.py",
        Kind.GRAPH_AGAIN,
        "The encoder runs on the same images again for each word of the captions.",
        "Encode the images once, before the loop over words.",
        half=3,
        step_function="handle",
    ),
    "cells": Truth(
        "cells.py",
        Kind.LOOP,
        "The Dice loss is summed up in Python loops over images and classes, with a slice of the probabilities each.",
        "Compute the coefficients of all images and classes with one reduction.",
        half=3,
    ),
    "activity": Truth(
        "activity.py",
        Kind.ALGEBRA,
        "Linear attention writes the outer product of key and value for each sample and then sums over the samples.",
        "Sum by a matrix product: k.transpose(-2, -1) @ v.",
        half=3,
    ),
    "wildlife": Truth(
        "wildlife.py",
        Kind.EVALUATED_TOO_OFTEN,
        "The model runs a second time on each training batch, for the accuracy.",
        "Take the accuracy from the output that the loss has used.",
        half=3,
    ),
    "pricing": Truth(
        "pricing.py",
        Kind.MODEL_AGAIN,
        "Weights and the optimizer's state are deep-copied before each step, to go back to if the loss is not finite.",
        "Look at the loss before the weights change and skip the step; or copy now and then.",
        half=3,
    ),
    "lightning_vae": Truth(
        "lightning_vae.py",
        Kind.EVALUATED_TOO_OFTEN,
        "After each training batch images are rebuilt and sampled, and a picture of them is written.",
        "Draw the picture once in many steps, or at the end of an epoch.",
        half=3,
    ),
    "ppo": Truth(
        "ppo/train.py",
        Kind.RESULT_AGAIN,
        "Advantages of the whole rollout, which do not change, are computed in a Python loop for each minibatch.",
        "Compute them once for each rollout.",
        half=3,
    ),
}
NAMES: Final = tuple(TRUTHS)
