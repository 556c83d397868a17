"""How well the default model, asked, ranks entailment: `python bench/nli.py`. One table, a minute on a CPU.

Twelve premises, each with a hypothesis that it says, one that it leaves open and one that it contradicts, written for
this. AUC: the share of (positive, negative) couples in the right order; 0.5 is chance. The peer is the model asked for
a word: p(yes, maybe, no) behind the question, alone and divided by what it answers without a premise.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minikid.model import load
from minikid.nli import LABELS, CrossEncoder, LanguageModelNLI

QUESTION = "{premise}\n\nQuestion: {hypothesis} Is this true, according to the text? Answer yes, no or maybe."
WORDS = ("Yes", "Maybe", "No")

TRIOS = [  # premise, entailment, neutral, contradiction
    (
        "Ulaanbaatar is the capital and the largest city of Mongolia. It lies in the valley of the river Tuul.",
        "Ulaanbaatar is the capital of Mongolia.",
        "Ulaanbaatar has an opera house.",
        "The capital of Mongolia lies on the coast of the Pacific Ocean.",
    ),
    (
        "The bridge was opened in 1932 after eight years of work, and sixteen workers died while it was built.",
        "It took eight years to build the bridge.",
        "The bridge was designed by a Scottish engineer.",
        "Nobody died while the bridge was built.",
    ),
    (
        "Marie Curie won the Nobel Prize in Physics in 1903 and the Nobel Prize in Chemistry in 1911.",
        "Marie Curie won two Nobel Prizes.",
        "Marie Curie liked to ride a bicycle.",
        "Marie Curie won the Nobel Prize in Literature in 1903.",
    ),
    (
        "The trial followed 412 patients for two years. The drug had no effect on blood pressure.",
        "The drug did not change blood pressure.",
        "Most of the patients were older than sixty.",
        "The drug lowered blood pressure by half.",
    ),
    (
        "The novel was first published in French in 1862 and was translated into English in the same year.",
        "The novel was written in French.",
        "The novel sold a million copies.",
        "The novel was never translated into English.",
    ),
    (
        "Penguins cannot fly, but they swim fast and dive deep to catch fish and krill.",
        "Penguins are good swimmers.",
        "Penguins live for about twenty years.",
        "Penguins fly long distances every winter.",
    ),
    (
        "The band comes from Las Vegas, Nevada. Its singer is Dan Reynolds and its drummer is Daniel Platzman.",
        "Dan Reynolds sings in a band from Nevada.",
        "The band toured Japan in 2015.",
        "Dan Reynolds plays the drums in a band from Boston.",
    ),
    (
        "Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a high mountain.",
        "On a high mountain water boils below 100 degrees Celsius.",
        "The mountain is covered with snow.",
        "Water boils at 150 degrees Celsius at sea level.",
    ),
    (
        "All the children of the village walk to school, because there is no bus.",
        "No child of the village takes a bus to school.",
        "The school has two hundred pupils.",
        "The children of the village go to school by bus.",
    ),
    (
        "The company was founded by two brothers in 1976 and was sold to a larger rival in 1998.",
        "The company is older than twenty years.",
        "The company makes shoes.",
        "The company was founded by three sisters in 1998.",
    ),
    (
        "The museum is closed on Mondays. On all other days it opens at nine in the morning.",
        "The museum opens at nine on Fridays.",
        "The museum shows paintings by Vermeer.",
        "The museum opens at nine on Mondays.",
    ),
    (
        "Spain beat the Netherlands 1-0 in the final of the 2010 World Cup in Johannesburg.",
        "Spain won the 2010 World Cup.",
        "It rained during the final of the 2010 World Cup.",
        "The Netherlands won the 2010 World Cup.",
    ),
]
PAIRS = [(premise, text, label) for premise, *texts in TRIOS for text, label in zip(texts, LABELS, strict=True)]


def asked(model, tokenizer, calibrate):
    """Probabilities of the answer words, [N, 3]."""

    def answers(premise, hypothesis):
        prompt = tokenizer.prompt(QUESTION.format(premise=premise, hypothesis=hypothesis), True)
        return model(torch.tensor([prompt]))[0, -1].log_softmax(-1)[[tokenizer.encode(word)[0] for word in WORDS]]

    log_p = torch.stack([answers(premise, text) for premise, text, _ in PAIRS])
    if calibrate:
        log_p = log_p - torch.stack([answers("N/A", text) for _, text, _ in PAIRS])
    return log_p.softmax(-1)


def auc(scores, positive):
    yes = [score for score, label in zip(scores, positive, strict=True) if label]
    no = [score for score, label in zip(scores, positive, strict=True) if not label]
    return sum((a > b) + 0.5 * (a == b) for a in yes for b in no) / (len(yes) * len(no))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nli", metavar="DIR", help="an NLI cross-encoder to measure beside the language model")
    args = parser.parse_args()
    model, tokenizer = load()
    pairs = [(premise, text) for premise, text, _ in PAIRS]
    with torch.inference_mode():
        rows = {
            "asked yes, maybe, no": asked(model, tokenizer, False),
            "the same, calibrated": asked(model, tokenizer, True),
            "LanguageModelNLI": LanguageModelNLI(model, tokenizer).scores(pairs),
        }
    if args.nli:
        rows["CrossEncoder"] = CrossEncoder.from_folder(args.nli).scores(pairs)
    said, denied = ([label == LABELS[i] for *_, label in PAIRS] for i in (0, 2))
    print(f"{'AUC on ' + str(len(PAIRS)) + ' pairs':24} {'entailment':>12} {'contradiction':>14} {'E over C':>10}")
    for name, p in rows.items():
        decided = [i for i, (*_, label) in enumerate(PAIRS) if label != "neutral"]
        versus = auc((p[decided, 0] - p[decided, 2]).tolist(), [said[i] for i in decided])
        print(f"{name:24} {auc(p[:, 0].tolist(), said):12.2f} {auc(p[:, 2].tolist(), denied):14.2f} {versus:10.2f}")


if __name__ == "__main__":
    main()
