"""Export traces to other tools' formats: Chrome-trace JSON and protobuf, each as a generator of bytes.

Flame graphs are written by `stepscope.analysis.flame`, tables and OpenMetrics by `stepscope.report.tables`.
"""
