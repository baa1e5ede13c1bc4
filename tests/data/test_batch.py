import numpy as np
import torch

from titan_exp.data.batch import collate
from titan_exp.ops.cross_entropy import IGNORE_INDEX

WINDOWS = np.array([[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]])
STARTS = [[2, 3], [5]]


def test_labels_are_the_next_tokens():
    batch = collate(WINDOWS, STARTS, document_mask=False, reset_positions=False)
    assert batch.tokens.tolist() == WINDOWS[:, :-1].tolist()
    assert batch.labels.tolist() == WINDOWS[:, 1:].tolist()
    assert batch.positions is None
    assert batch.documents is None
    assert {batch.tokens.dtype, batch.labels.dtype} == {torch.int64}


def test_document_mask_numbers_documents_and_does_not_predict_across_them():
    batch = collate(WINDOWS, STARTS, document_mask=True, reset_positions=False)
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]
    # The token before each start predicts nothing, the last label included where the next row starts a document.
    assert batch.labels.tolist() == [[2, IGNORE_INDEX, IGNORE_INDEX, 5, 6], [12, 13, 14, 15, IGNORE_INDEX]]
    assert batch.positions is None


def test_positions_restart_at_each_document():
    batch = collate(WINDOWS, STARTS, document_mask=False, reset_positions=True)
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.documents is None
    assert batch.labels.tolist() == WINDOWS[:, 1:].tolist()


def test_to_moves_every_tensor():
    batch = collate(WINDOWS, STARTS, document_mask=True, reset_positions=True).to("meta")
    assert batch.positions is not None
    assert batch.documents is not None
    assert {batch.tokens.device.type, batch.labels.device.type, batch.positions.device.type} == {"meta"}
    assert batch.documents.device.type == "meta"
