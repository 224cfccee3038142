"""Pictures and tables of what a trace recorded: the pool, the steps, tables, slots, hash chains, call paths; rooflines.

Everything here is drawn from plain data (`refengine.trace.record.Record`, `PoolState`, lists) and never from a
running engine, so a picture of vLLM's recorded decisions and one of ours are made by the same code. A picture
is an `<img>` with an alternative text that says the same; a table is text and HTML with the same cells.
"""

from refengine.viz.callpath import callpath_picture
from refengine.viz.callpath_stepper import CallPathStepper, callpath_widget
from refengine.viz.chain import HashedBlock, chain_picture, hashed_blocks
from refengine.viz.layout import layout_picture
from refengine.viz.picture import Picture
from refengine.viz.pool import changed_blocks, joined_queue, left_queue, pool_pair, pool_picture
from refengine.viz.roofline import Roof, Work, roofline
from refengine.viz.state import BlockFacts, PoolState, around, moments, states
from refengine.viz.stepper import Stepper, stepper
from refengine.viz.tables import Table, block_table, marks_table, queue_table, request_table
from refengine.viz.timeline import marks_picture, timeline
from refengine.viz.where import where_in_vllm

__all__ = [
    "BlockFacts",
    "CallPathStepper",
    "HashedBlock",
    "Picture",
    "PoolState",
    "Roof",
    "Stepper",
    "Table",
    "Work",
    "around",
    "block_table",
    "callpath_picture",
    "callpath_widget",
    "chain_picture",
    "changed_blocks",
    "hashed_blocks",
    "joined_queue",
    "layout_picture",
    "left_queue",
    "marks_picture",
    "marks_table",
    "moments",
    "pool_pair",
    "pool_picture",
    "queue_table",
    "request_table",
    "roofline",
    "states",
    "stepper",
    "timeline",
    "where_in_vllm",
]
