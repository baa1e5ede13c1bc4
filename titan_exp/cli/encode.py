"""Encode captioned images into a latent store, for training a diffusion model."""

from collections.abc import Sequence
from pathlib import Path

from titan_exp.config.command_line.options import HELP, options_help, parse_options
from titan_exp.config.command_line.verb_options import EncodeOptions
from titan_exp.config.errors.user_error import UserError, Violation

USAGE = """\
titan-exp encode images=glyphs out=STORE [size=...]
  for example: titan-exp encode images=glyphs out=stores/glyphs"""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        print(options_help(USAGE, EncodeOptions), end="")
        return 0
    options = parse_options(EncodeOptions, argv, positional=[])
    if not options.out:
        raise UserError("This cannot be encoded.", [Violation("out", "", "no folder is given", "out=stores/glyphs")])
    if options.size % options.patch:
        near = max(1, round(options.size / options.patch)) * options.patch
        violation = Violation("size", options.size, f"patches are {options.patch} pixels wide", f"nearest: size={near}")
        raise UserError("This cannot be encoded.", [violation])
    from titan_exp.data.latent_store.emoji import EmojiImages
    from titan_exp.data.latent_store.glyphs import GlyphImages
    from titan_exp.data.latent_store.hashed_words import HashedWords
    from titan_exp.data.latent_store.pixels import Pixels
    from titan_exp.data.latent_store.writer import Encoders, write_latent_store

    manifest = write_latent_store(
        Path(options.out).expanduser(),
        EmojiImages(options.size) if options.images == "emoji" else GlyphImages(options.size),
        Encoders(
            Pixels(options.patch),
            HashedWords(options.text_tokens, options.text_dim, options.pooled_dim, options.seed),
        ),
        validation_fraction=options.validation_fraction,
        shard_samples=options.shard_samples,
        seed=options.seed,
    )
    samples = manifest.samples
    print(
        f"{options.out}: {samples['train']:,} samples to train on and {samples['validation']:,} held out, each of "
        f"{manifest.text_tokens} text and {manifest.rows}x{manifest.columns} image tokens"
    )
    print(f"To train from it: titan-exp train +experiment=flux_laptop data.paths='[{options.out}]'")
    return 0
