"""The one builder of notebooks.

chapters/source/*.md -> chapters/*.ipynb (executed); solutions/source/*.py -> solutions/*.ipynb (executed) and
exercises/*.ipynb (stubbed). The sources are the truth and are what people edit and review; the notebooks are made
from them, and the same source gives the same bytes.
"""
