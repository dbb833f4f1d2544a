"""The page: one front end for `stepscope view`, the HTML report and notebooks; its sources are in web/."""
