"""Small training programs, each with a clean twin and a twin in which one fault is planted.

    python -m tests.zoo.per_token_loss --fault      # or --clean
    stepscope run -m tests.zoo.per_token_loss --fault

Every program is one file. Its docstring says what is planted and which rule should find it first; the lines marked
`# planted` are those that the finding should name. ``registry`` reads both. `benchmarks/diagnosis_accuracy.py` records
them all and compares what stepscope promises with what the clean twin really saves.
"""
