"""Losses of knowledge distillation (Hinton et al.)."""

import torch.nn.functional as F


def soft_targets(student_scores, teacher_scores, temperature):
    student = F.log_softmax(student_scores / temperature, dim=1)
    teacher = F.softmax(teacher_scores / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean") * temperature**2


def distillation_loss(student_scores, teacher_scores, labels, temperature, weight):
    hard = F.cross_entropy(student_scores, labels)
    return weight * soft_targets(student_scores, teacher_scores, temperature) + (1 - weight) * hard
