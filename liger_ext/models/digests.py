"""Digests of known code of transformers, and the mixin that does the same as each: see `liger_ext.models.known_code`.

A comment names the class that a digest was made of, and the versions of transformers that have it.
"""

from liger_ext.models import causal_lm, decoder, experts, family_heads, family_layers, family_mlps, mlp, norms

MODULES = {
    "60124dba9ec667fc": norms.RMSNorm,  # LlamaRMSNorm, of all supported versions
    "772ee58d2d19d212": mlp.MLP,  # LlamaMLP, of all supported versions
    "6840773630df7bfb": norms.ZeroCenteredRMSNorm,  # GemmaRMSNorm, of all supported versions
    "9b3ccf7bc55dacbc": norms.RMSNormInFloat,  # Olmo2RMSNorm of 4.52 on, GptOssRMSNorm
    "6db6c99a8daaac66": mlp.PackedMLP,  # Phi3MLP, of all supported versions
    "9bd86a2adeb8e0f1": norms.Gemma4RMSNorm,  # Gemma3nRMSNorm of 5.0 on, too
    "d199f149d0201200": norms.Llama4RMSNorm,  # Llama4TextRMSNorm, of all supported versions
    "f52b0b83f23f1504": norms.WeightlessRMSNorm,  # Llama4TextL2Norm, of all supported versions, and NanoChatRMSNorm
    "3a01c6397c5d825a": norms.GatedRMSNorm,  # Qwen3NextRMSNormGated of 5.23
    "fff7722f04a8a12a": norms.GatedRMSNorm,  # before
    "4b89999e1138e990": norms.GroupedGatedRMSNorm,  # Zamba2RMSNormGated of all versions, MambaRMSNormGated of 5.23
    "1ee68e3d00f74626": norms.GroupedGatedRMSNorm,  # before, of one group
    "6b38073ba502e746": norms.FalconGatedRMSNorm,  # FalconH1RMSNormGated
    "3beae2945cbfee6b": norms.GatedRMSNormInFloat,  # KimiLinearRMSNormGated
    "a2e3fddb639d7303": norms.RMSNormInFloat,  # HeliumRMSNorm, NemotronHRMSNorm
    "ca789223bc1da9bf": norms.MoshiRMSNorm,
    "936550f5e662b183": norms.CpmAntRMSNorm,  # CpmAntLayerNorm
    "08820e3e55d06a92": norms.WeightlessRMSNorm,  # DeepseekV4UnweightedRMSNorm
    "d5c19e1ed8aa3ed9": norms.MuseSparkRMSNorm,  # MuseSparkTextCenteredRMSNorm
    "bc1992a9cbf3787c": norms.Qwen4RMSNorm,  # Qwen4ExpTextRMSNorm
    "1536522a1c475a46": norms.WeightlessLayerNorm,  # OlmoLayerNorm
    "6c6fe8a02f94ff80": norms.UnbiasedLayerNorm,  # CohereLayerNorm, of all supported versions
    "d7fa5e115d167c68": norms.LayerNorm1P,  # NemotronLayerNorm1P of 5.23
    "f44af472c7ec738f": norms.LayerNorm1P,  # of 4.57
    "8c8f102b770d5911": norms.LayerNorm1P,  # of 4.51
    "ca9a554d1ab80655": mlp.Llama4MLP,  # Llama4TextMLP, of all supported versions
    "72bfbb7d3dc9f39a": mlp.MixtralMLP,  # MixtralBlockSparseTop2MLP, before 5.0
    "d044ee5fd3791071": mlp.VisionMLP,  # Qwen2_5_VLMLP, of all supported versions
    "f1722523e977562e": mlp.DropoutMLP,  # SeedOssMLP
    "dd5b9aaccd76af6e": mlp.ScaledMLP,  # FalconH1MLP
    "ddd59236609ca05d": mlp.MLP,  # BeamMLP, which rounds once, as our ops do
    "e070aeb3dba8977a": mlp.ClampedMLP,  # DeepseekV4MLP
    "17cf479d3ec7b2b8": mlp.Glm5MLP,  # Glm5NextTextMLP
    "61140b184529f95f": mlp.Glm5VisionMLP,  # Glm5NextVisionMLP
    "3928cd6ccc79d0eb": mlp.MiniMaxM3MLP,  # MiniMaxM3VLDenseMLP
    "e9344ad595829737": mlp.Step3p7MLP,
    "565a0681fba6e144": mlp.MLP,  # IdeficsMLP, Idefics2MLP
    "eec80c48bc5752a7": family_mlps.Lfm2MLP,
    "407bd310fb271832": family_mlps.GraniteMoeMLP,  # GraniteMoeSharedMLP
    "6e0a98ce4be52c75": family_mlps.T5GemmaMLP,  # and GteMLP
    "eac7f5de546a96e0": family_mlps.ModernBertMLP,
    "4ac71f6d69903b76": family_mlps.BitNetMLP,
    "6d43ee3932c011d4": family_mlps.InklingMLP,
    "e5269b621178e9d2": family_mlps.Gemma3nMLP,  # Gemma3nTextMLP
    "7aeab21e31505f34": mlp.UngatedMLP,  # NemotronMLP, of all supported versions
    "3bde1f7cbb4577d3": experts.BatchedExperts,  # Llama4TextExperts
    "ff0c58dfe50a91a1": decoder.FalconH1Layer,  # FalconH1DecoderLayer of 5.23
    "94aeadfa2439441d": family_layers.KimiLayer,  # KimiLinearDecoderLayer, BailingHybridDecoderLayer
    "526a4a80da0d45ba": family_layers.Lfm2Layer,  # Lfm2DecoderLayer
    "c177d7d45a6344e1": family_layers.Lfm3Layer,  # Lfm3DecoderLayer
    "e001def6fc3f29bd": family_layers.JetMoeLayer,  # JetMoeDecoderLayer
    "91fa72f9b9074a8e": family_layers.JambaMambaLayer,  # JambaMambaDecoderLayer
    "22aeb0626f436d8e": family_layers.OlmoHybridLayer,  # OlmoHybridLinearAttentionDecoderLayer
}

GATES_OF_EXPERTS = {  # the method `_apply_gate`
    "85a2a19f9d9ab531": experts.Experts,  # transformers.integrations.moe, 5.0 on
    "79c93225644c1d1b": experts.Experts,  # BeamExperts, which round once, as our ops do
    "a91b2991f6a06b46": experts.ClampedExperts,  # DeepseekV4Experts
    "883708ece524f8c2": experts.Glm5Experts,  # Glm5NextTextExperts, HYV4Experts
    "cc539ffe5e07ec2a": experts.GptOssExperts,
    "b7ac955cabb53a89": experts.MiniMaxM3Experts,  # MiniMaxM3VLExperts
    "0d4e8d1b508bf372": experts.PrivacyFilterExperts,  # OpenAIPrivacyFilterExperts
    "c49a2b1adbc80fc6": experts.Step3p7Experts,
}

# Heads and layers: the normal forms of Llama's own, and how those of others differ from Llama's of the same version.
HEADS_OF_LLAMA = {
    "b5140c1a4c6ab43a",  # before 5.21
    "63a66e48d9d72bde",  # 5.21 on
}
LAYERS_OF_LLAMA = {
    "e4bd0be89ab17d15",  # before 4.54
    "1533dd3b4dba9347",  # 4.54 on
}
LOSSES = {  # ForCausalLMLoss
    "6df4cadb1c1b65a3",  # before 4.53
    "dcb8c4f2a6cb4596",  # 4.53 on
}

HEADS = {
    "e3b0c44298fc1c14": causal_lm.CausalLM,  # no difference
    "4206523c3d624681": causal_lm.CausalLMOfFloat,  # MllamaForCausalLM of 5.23
    "16e3f0f1e301af3b": causal_lm.CausalLMOfFloat,  # of 4.57 and 5.0
    "373101107cb6167f": causal_lm.MoeCausalLM,  # MixtralForCausalLM: before 5.21
    "992b7f5ae80f47f3": causal_lm.MoeCausalLM,  # MixtralForCausalLM: 5.21 on
    "05ee9b69cac8fea0": causal_lm.MoeOfTextCausalLM,  # Qwen3VLMoeForConditionalGeneration: before 5.21
    "6e731a38ddb6693a": causal_lm.MoeOfTextCausalLM,  # Qwen3VLMoeForConditionalGeneration: 5.21 on
    "8b4356d32493778d": causal_lm.MoeOfTextCausalLM,  # Glm4vMoeForConditionalGeneration: before 5.21
    "a7e748a643ba0320": causal_lm.MoeOfTextCausalLM,  # Glm4vMoeForConditionalGeneration: 5.21 on
    "215450fec8a12269": causal_lm.SoftcappedCausalLM,  # Gemma2ForCausalLM, Gemma3ForCausalLM: before 5.21
    "4bfd7193cec21851": causal_lm.SoftcappedCausalLM,  # Gemma2ForCausalLM, Gemma3ForCausalLM: 5.21 on
    "b6abbab03d22bf75": causal_lm.SoftcappedCausalLM,  # PaliGemmaForConditionalGeneration of 5.21 on
    "90a035fe004c7c5f": causal_lm.SoftcappedCausalLM,  # Gemma4ForCausalLM
    "5bb3ce3b0ec0d271": causal_lm.SoftcappedCausalLM,  # Gemma4ForConditionalGeneration
    "54b32f5a3ee81c22": causal_lm.DividedCausalLM,  # GraniteForCausalLM, GraniteSWAForCausalLM: before 5.21
    "c89d133a9450b5e1": causal_lm.DividedCausalLM,  # GraniteForCausalLM, GraniteSWAForCausalLM: 5.21 on
    "1be87b34994e03e2": causal_lm.MultipliedCausalLM,  # CohereForCausalLM, Cohere2ForCausalLM: before 5.21
    "ddf3b322855dbcd8": causal_lm.MultipliedCausalLM,  # CohereForCausalLM, Cohere2ForCausalLM: 5.21 on
    "82d6988cdc7405b5": causal_lm.MultipliedByModelCausalLM,  # FalconH1ForCausalLM of 5.23
    "3767d2a34de19d11": causal_lm.MultipliedByModelCausalLM,  # of 4.57 and 5.0
    "43bc3dc2742de6b9": family_heads.GraniteMoeCausalLM,  # GraniteMoeForCausalLM: before 5.21
    "8b5377e5661e6971": family_heads.GraniteMoeCausalLM,  # GraniteMoeForCausalLM: 5.21 on
    "4b318853f44aaabc": family_heads.MambaCausalLM,  # MambaForCausalLM
    "7cc36e5ddc883599": causal_lm.RoutedCausalLM,  # AfmoeForCausalLM
    "d8458b697e43947a": family_heads.BambaCausalLM,  # BambaForCausalLM
    "5bf4b73953755960": family_heads.BeamCausalLM,  # BeamForCausalLM
    "404a6b9b857791e3": family_heads.CastCausalLM,  # HYV4ForCausalLM
    "cecfa2ba56da5deb": causal_lm.CausalLM,  # HYV3ForCausalLM: before 5.21
    "17e5bf55ac3c1f17": causal_lm.CausalLM,  # HYV3ForCausalLM: 5.21 on
    "c9f7c6e7c4180095": family_heads.HyperCLOVAXCausalLM,  # HyperCLOVAXForCausalLM
    "c4728ef0e9422959": family_heads.JetMoeCausalLM,  # JetMoeForCausalLM: before 5.21
    "4ab349c0f34d166a": family_heads.JetMoeCausalLM,  # JetMoeForCausalLM: 5.21 on
    "5f7dd7f25f43c0db": family_heads.MiniCPM3CausalLM,  # MiniCPM3ForCausalLM: before 5.21
    "6dd7bc2f2edd6582": family_heads.MiniCPM3CausalLM,  # MiniCPM3ForCausalLM: 5.21 on
    "b8ab7d5db93c1acb": causal_lm.SoftcappedCausalLM,  # MistralLarge4ForConditionalGeneration
    "e1a416ae19593c1c": family_heads.RecurrentGemmaCausalLM,  # RecurrentGemmaForCausalLM: before 5.21
    "25f01c5db71d6dab": family_heads.RecurrentGemmaCausalLM,  # RecurrentGemmaForCausalLM: 5.21 on
    "663fa1540c02a1bc": causal_lm.CausalLM,  # OPTForCausalLM, whose logits are made contiguous
    "95bc3efb20a7d8ed": causal_lm.CausalLMInside,  # Llama4ForConditionalGeneration: 5.21 to 5.22
    "d5d3d60082fb9c10": causal_lm.CausalLMInside,  # Llama4ForConditionalGeneration: 5.23
    "df43bbc4c75e503a": causal_lm.CausalLM,  # Qwen2_5OmniThinkerForConditionalGeneration of 5.23
    "7aaddbebefca770c": family_heads.OmniMoeCausalLM,  # Qwen3OmniMoeThinkerForConditionalGeneration of 5.23
}

LAYERS = {
    "e3b0c44298fc1c14": decoder.DecoderLayer,  # no difference
    "e0be2885725a2891": decoder.SandwichLayer,  # Gemma2DecoderLayer: 4.53
    "d66eab5bd648b4a3": decoder.SandwichLayer,  # 5.0 on
    "9e5a9abaf359f3ad": decoder.SandwichLayer,  # 4.57
    "ece67c7ee148064c": decoder.Glm4Layer,  # Glm4DecoderLayer: before 4.54
    "baa1487ce9ce16e5": decoder.Glm4Layer,  # Glm4DecoderLayer, Glm4vTextDecoderLayer: 4.54 on
    "04db9b5b98fd88fd": decoder.ScaledLayer,  # GraniteDecoderLayer: before 4.54
    "ed7abe49417255ce": decoder.ScaledLayer,  # GraniteDecoderLayer, GraniteSWADecoderLayer: 5.4 on
    "ccae6f4b5a6a7353": decoder.ScaledLayer,  # of 4.57 and 5.0
    "1a24f42fad8b4479": decoder.DropoutLayer,  # Phi3DecoderLayer of 4.57 on
    "006a621e6d63f70a": decoder.DecoderLayer,  # GptOssDecoderLayer of 4.57 on, whose MLP returns a tuple
    "bf5baef291a11e8b": decoder.DecoderLayer,  # MllamaSelfAttentionDecoderLayer of 4.57 on
    "278f7c3027414f8a": decoder.Llama4Layer,  # Llama4TextDecoderLayer of 4.57 on
    "4fe48e8d42cab3fe": decoder.Gemma4Layer,  # Gemma4TextDecoderLayer of 5.23
    "700cff8a90f20cdc": decoder.Gemma4Layer,  # Gemma4UnifiedTextDecoderLayer of 5.23
    "63af6f22d7a211ac": family_layers.AfmoeLayer,  # AfmoeDecoderLayer
    "c7511bc2e1e48a53": family_layers.ApertusLayer,  # ApertusDecoderLayer
    "1674324d56d9d3b5": family_layers.BambaLayer,  # BambaDecoderLayer
    "a6aa642fe8b46c8f": family_layers.IndexedLayer,  # GlmMoeDsaDecoderLayer, MistralLarge4TextDecoderLayer
    "632813070f767a7a": family_layers.GraniteMoeLayer,  # GraniteMoeDecoderLayer
    "ac2d30d7238cbaa4": family_layers.GraniteMoeSharedLayer,  # GraniteMoeSharedDecoderLayer, GraniteMoeSWADecoderLayer
    "d995e12110a58f56": family_layers.GraniteMoeHybridLayer,  # GraniteMoeHybridDecoderLayer
    "7eaeebe549042da0": family_layers.HyperCLOVAXLayer,  # HyperCLOVAXDecoderLayer
    "7df0518cf6e58fe6": family_layers.JambaLayer,  # JambaAttentionDecoderLayer
    "f8aeb937e2b61bd4": family_layers.MiniCPM3Layer,  # MiniCPM3DecoderLayer
    "98f69d31ed4426e9": family_layers.VaultGemmaLayer,  # VaultGemmaDecoderLayer
    "bfb117403860c297": decoder.HybridLayer,  # Qwen3NextDecoderLayer of 5.23
    "53880cf3c14c81c5": decoder.HybridLayer,  # Qwen3_5DecoderLayer of 5.23
}

LEFT_ALONE = {  # in which nothing can be fused
    "10692e2a114ceeda",  # HYV4UnweightedRMSNorm: a factor, and no norm
    "0f97c051b1deacf6",  # Olmo2DecoderLayer: before 4.54
    "bca1876b6c914814",  # Olmo2DecoderLayer: 4.54 on
    "6a84d6d191cd01a8",  # CohereDecoderLayer: attention and MLP read the same norm's output, and are added as they are
    "51fbb08400495f6f",  # JambaAttention: no rotary embedding
    "99b604fb0ee1b006",  # KimiLinearAttention: likewise
    "c9f9057fc2b87987",  # KimiLinearDeltaAttention: likewise
    "5baa3ddc39704bae",  # BailingHybridDeltaAttention: likewise
    "0c1836bd5c1b8a18",  # MiniMaxLightningAttention: likewise
    "d9141434e8db4383",  # JetMoeParallelExperts: matmuls
    "9d2ffe6269178c7c",  # MiniMaxDecoderLayer: the norm's output is the residual stream, and the sum is not
    "6438bbf114e2e61b",  # DeepseekV4DecoderLayer: several residual streams, mixed by matrices
    "751c6d286b801103",  # Glm5NextTextDecoderLayer: likewise
    "dababbc1684c8787",  # HYV4DecoderLayer: likewise
    "6959bbf80495ce5e",  # Qwen4ExpTextDecoderLayer: likewise
    "99d6aa89323d63aa",  # NemotronDecoderLayer: the sum has no RMSNorm
    "f822802978cd2c60",  # GptOssMLP of 5.0 on: a router, and experts, which are looked at by themselves
    "10d871f6060ec597",  # before
}
