"""Prediction of the recorded steps on other hardware.

`operations` describes what device work does, independently of any device; `operation_times` predicts its time on one.
"""
