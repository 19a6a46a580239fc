# A small network that learns from a large one, after the knowledge distillation tutorial of PyTorch.
import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(42)
device = "cuda" if torch.cuda.is_available() else "cpu"
T, soft_target_loss_weight, ce_loss_weight, learning_rate = 2, 0.25, 0.75, 0.001


class DeepNN(nn.Module):
    def __init__(self, num_classes=10):
        super(DeepNN, self).__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.classifier = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, num_classes))

    def forward(self, x):
        x = self.features(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


class LightNN(nn.Module):
    def __init__(self, num_classes=10):
        super(LightNN, self).__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(kernel_size=2, stride=2)
        )
        self.classifier = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, num_classes))

    def forward(self, x):
        x = self.features(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


train_loader = [(torch.rand(8, 3, 8, 8), torch.randint(0, 10, (8,))) for _ in range(20)]
teacher = DeepNN().to(device)
student = LightNN().to(device)
ce_loss = nn.CrossEntropyLoss()
optimizer = optim.Adam(student.parameters(), lr=learning_rate)


def kd_loss(student_logits, labels, teacher_logits):
    # Soften the student logits by applying softmax first and log() second
    soft_targets = nn.functional.softmax(teacher_logits / T, dim=-1)
    soft_prob = nn.functional.log_softmax(student_logits / T, dim=-1)
    # Calculate the soft targets loss. Scaled by T**2 as suggested by the authors of the paper
    soft_targets_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
    label_loss = ce_loss(student_logits, labels)
    return soft_target_loss_weight * soft_targets_loss + ce_loss_weight * label_loss


teacher.eval()  # Teacher set to evaluation mode
student.train()  # Student to train mode
losses = []
running_loss = 0.0
for inputs, labels in train_loader:
    inputs, labels = inputs.to(device), labels.to(device)
    optimizer.zero_grad()
    # Forward pass with the teacher model - do not save gradients here as we do not change the teacher's weights
    with torch.no_grad():
        teacher_logits = teacher(inputs)
    # Forward pass with the student model
    loss = kd_loss(student(inputs), labels, teacher_logits)
    loss.backward()
    optimizer.step()
    running_loss += loss.item()
    losses.append(loss.item())
print(f"Loss: {running_loss / len(train_loader)}")
