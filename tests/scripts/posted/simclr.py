# Contrastive learning of two views, after sthalles/SimCLR.
import torch
import torch.nn as nn
import torch.nn.functional as F

batch_size, n_views, temperature = 8, 2, 0.07
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim):
        super(ResNetSimCLR, self).__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        # add mlp projection head
        self.fc = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, out_dim))

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.bn2(self.conv2(x)))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


def info_nce_loss(features):
    labels = torch.cat([torch.arange(batch_size) for i in range(n_views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).double()
    labels = labels.to(device)

    features = F.normalize(features, dim=1)

    similarity_matrix = torch.matmul(features, features.T)

    # discard the main diagonal from both: labels and similarities matrix
    mask = torch.eye(labels.shape[0], dtype=torch.bool).to(device)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)

    # select and combine multiple positives
    positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)

    # select only the negatives the negatives
    negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)

    logits = torch.cat([positives, negatives], dim=1)
    labels = torch.zeros(logits.shape[0], dtype=torch.long).to(device)

    logits = logits / temperature
    return nn.CrossEntropyLoss()(logits, labels)


model = ResNetSimCLR(out_dim=8).to(device)
optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)


def two_views():
    x = torch.rand(batch_size, 3, 8, 8)
    return [x + 0.1 * torch.randn_like(x), torch.flip(x, [-1]) + 0.1 * torch.randn_like(x)]


losses = []
images = torch.cat(two_views(), dim=0).to(device)
for n_iter in range(20):
    loss = info_nce_loss(model(images))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    images = torch.cat(two_views(), dim=0).to(device)
    losses.append(loss.item())
    if n_iter % 10 == 0:
        print(f"Step: {n_iter}\tLoss: {loss.item()}")
