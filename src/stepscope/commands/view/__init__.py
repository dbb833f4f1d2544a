"""The page of a trace, a run or the ranks of a job."""
