"""How the shipped predictor is made from published timings: `python -m scripts.predictor.train FOLDER`."""
