# Two networks, two optimizers and two steps, after the DCGAN tutorial of PyTorch.
import torch
import torch.nn as nn
import torch.optim as optim

manualSeed = 999
print("Random Seed: ", manualSeed)
torch.manual_seed(manualSeed)
batch_size = 8
nc = 1  # Number of channels in the training images
nz = 16  # Size of z latent vector (i.e. size of generator input)
ngf = 8  # Size of feature maps in generator
ndf = 8  # Size of feature maps in discriminator
lr = 0.0002
beta1 = 0.5
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super(Discriminator, self).__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input)


netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
criterion = nn.BCELoss()
real_label = 1.0
fake_label = 0.0
optimizerD = optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))


class GAN(nn.Module):
    # the two losses: of the discriminator on real and fake images, of the generator on fake ones
    def __init__(self):
        super().__init__()
        self.netG = netG
        self.netD = netD

    def forward(self, noise, real=None):
        fake = self.netG(noise)
        if real is None:
            output = self.netD(fake).view(-1)
            return criterion(output, torch.full_like(output, real_label))
        output = self.netD(real).view(-1)
        errD_real = criterion(output, torch.full_like(output, real_label))
        output = self.netD(fake.detach()).view(-1)
        errD_fake = criterion(output, torch.full_like(output, fake_label))
        return errD_real + errD_fake


gan = GAN()
dataset = [torch.rand(batch_size, nc, 16, 16) * 2 - 1 for _ in range(20)]
G_losses = []
D_losses = []
noise = torch.randn(batch_size, nz, 1, 1, device=device)
print("Starting Training Loop...")
for i, data in enumerate(dataset):
    # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    real_cpu = data.to(device)
    errD = gan(noise, real_cpu)
    errD.backward()
    optimizerD.step()

    # (2) Update G network: maximize log(D(G(z)))
    netG.zero_grad()
    errG = gan(noise)
    errG.backward()
    optimizerG.step()

    if i % 10 == 0:
        print("[%d/%d]\tLoss_D: %.4f\tLoss_G: %.4f" % (i, len(dataset), errD.item(), errG.item()))
    G_losses.append(errG.item())
    D_losses.append(errD.item())
    noise = torch.randn(batch_size, nz, 1, 1, device=device)
