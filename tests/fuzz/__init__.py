"""Files damaged at random, each format by its own structure, and what every command promises of them.

``seeds`` makes small good files, ``values``, ``messages`` and ``containers`` damage them, ``formats`` lists the
formats, ``invariants`` says what must hold, ``workers`` runs it all; ``scripts/fuzz`` starts it. See docs/fuzzing.md.
"""
