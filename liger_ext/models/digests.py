"""Digests of known code of transformers, and the mixin that does the same as each: see `liger_ext.models.known_code`.

A comment names the class that a digest was made of, and the versions of transformers that have it.
"""

from liger_ext.models import causal_lm, decoder, experts, family_heads, family_layers, family_mlps, mlp, norms

MODULES = {
    "b748919e3a9033e5": norms.ZeroCenteredRMSNorm,  # GemmaRMSNorm, of all supported versions
    "eef4e978a32aa4a4": norms.RMSNormInFloat,  # Olmo2RMSNorm of 4.52 on, GptOssRMSNorm
    "e8d404cbecb96285": mlp.PackedMLP,  # Phi3MLP, of all supported versions
    "cb22d52059d9aaf1": norms.Gemma4RMSNorm,  # Gemma3nRMSNorm of 5.0 on, too
    "6fb92cf4142d8989": norms.Llama4RMSNorm,  # Llama4TextRMSNorm, of all supported versions
    "07d835dcad37e65e": norms.WeightlessRMSNorm,  # Llama4TextL2Norm, of all supported versions, and NanoChatRMSNorm
    "96920b139d7fbbc2": norms.GatedRMSNorm,  # Qwen3NextRMSNormGated of 5.23
    "0befe0d7cbec41df": norms.GatedRMSNorm,  # before
    "e930594abdf99541": norms.GroupedGatedRMSNorm,  # Zamba2RMSNormGated of all versions, MambaRMSNormGated of 5.23
    "0784e1271fca788e": norms.GroupedGatedRMSNorm,  # before, of one group
    "873a05ece6ae6c87": norms.FalconGatedRMSNorm,  # FalconH1RMSNormGated
    "66adebd7ca546584": norms.GatedRMSNormInFloat,  # KimiLinearRMSNormGated
    "b6d7ab076811b6bb": norms.RMSNormInFloat,  # HeliumRMSNorm, NemotronHRMSNorm
    "6c689aff50353752": norms.MoshiRMSNorm,
    "cd89819860dd7a28": norms.CpmAntRMSNorm,  # CpmAntLayerNorm
    "08c50f9bfacacd6e": norms.WeightlessRMSNorm,  # DeepseekV4UnweightedRMSNorm
    "26ed4a76ea3751ae": norms.MuseSparkRMSNorm,  # MuseSparkTextCenteredRMSNorm
    "e72858ace938c2af": norms.Qwen4RMSNorm,  # Qwen4ExpTextRMSNorm
    "b8440eb33e1a94ab": norms.WeightlessLayerNorm,  # OlmoLayerNorm
    "ec976d1bff6235ff": norms.UnbiasedLayerNorm,  # CohereLayerNorm, of all supported versions
    "9256ffcc8828f07e": norms.LayerNorm1P,  # NemotronLayerNorm1P of 5.23
    "957547f394ae4ffa": norms.LayerNorm1P,  # of 4.57
    "d6d1d883e2820916": norms.LayerNorm1P,  # of 4.51
    "c4447c48b0f9ccf3": mlp.Llama4MLP,  # Llama4TextMLP, of all supported versions
    "a937255ed446bfd6": mlp.MixtralMLP,  # MixtralBlockSparseTop2MLP, before 5.0
    "0d7b11835db6b508": mlp.VisionMLP,  # Qwen2_5_VLMLP, of all supported versions
    "24ed32eb8cb32194": mlp.DropoutMLP,  # SeedOssMLP
    "2ccda7a06d8a5c89": mlp.ScaledMLP,  # FalconH1MLP
    "c9e76b5bb599ae56": mlp.MLP,  # BeamMLP, which rounds once, as our ops do
    "274a2130f54d2906": mlp.ClampedMLP,  # DeepseekV4MLP
    "d84b50efd534f443": mlp.Glm5MLP,  # Glm5NextTextMLP
    "f3a23aa069db6e26": mlp.Glm5VisionMLP,  # Glm5NextVisionMLP
    "6e130543faf555f5": mlp.MiniMaxM3MLP,  # MiniMaxM3VLDenseMLP
    "e8216d20c75cda11": mlp.Step3p7MLP,
    "f2793fe16ca018bf": mlp.MLP,  # IdeficsMLP, Idefics2MLP
    "5b77919a3bcb1949": family_mlps.Lfm2MLP,
    "7c9083fca1b5399a": family_mlps.GraniteMoeMLP,  # GraniteMoeSharedMLP
    "18b69b733dcf947c": family_mlps.T5GemmaMLP,  # and GteMLP
    "8a2ff74b6f50ec44": family_mlps.ModernBertMLP,
    "35f83843ca931c54": family_mlps.BitNetMLP,
    "886db7d287763b42": family_mlps.InklingMLP,
    "c9adc1050e429844": family_mlps.Gemma3nMLP,  # Gemma3nTextMLP
    "81bc4bc569be56c2": mlp.UngatedMLP,  # NemotronMLP, of all supported versions
    "5f66bc719c393081": experts.BatchedExperts,  # Llama4TextExperts
    "027e9ce52954e82b": decoder.FalconH1Layer,  # FalconH1DecoderLayer of 5.23
    "0d11ae82abbbd42a": family_layers.KimiLayer,  # KimiLinearDecoderLayer, BailingHybridDecoderLayer
    "8f9d799819a43be4": family_layers.Lfm2Layer,  # Lfm2DecoderLayer
    "c66108d3ca637fe9": family_layers.Lfm3Layer,  # Lfm3DecoderLayer
    "bd38cd15c6afd337": family_layers.JetMoeLayer,  # JetMoeDecoderLayer
    "dbdcb59a8df265ab": family_layers.JambaMambaLayer,  # JambaMambaDecoderLayer
    "2c515e918ccc1fd9": family_layers.OlmoHybridLayer,  # OlmoHybridLinearAttentionDecoderLayer
}

GATES_OF_EXPERTS = {  # the method `_apply_gate`
    "82821f94b28660b6": experts.Experts,  # transformers.integrations.moe, 5.0 on
    "215319595e48dda1": experts.Experts,  # BeamExperts, which round once, as our ops do
    "f40d55cf51496849": experts.ClampedExperts,  # DeepseekV4Experts
    "11ddbf6b28be8aec": experts.Glm5Experts,  # Glm5NextTextExperts, HYV4Experts
    "63686633f3cb5d4a": experts.GptOssExperts,
    "c8648a009a61ce3c": experts.MiniMaxM3Experts,  # MiniMaxM3VLExperts
    "c67222ebfdcf6a4d": experts.PrivacyFilterExperts,  # OpenAIPrivacyFilterExperts
    "e3bd0e725eb8cf46": experts.Step3p7Experts,
}

# Heads and layers change from version to version, but what others do differently from Llama's in the same does not.
HEADS = {
    "e3b0c44298fc1c14": causal_lm.CausalLM,  # no difference
    "9a35629b99bb02e3": causal_lm.CausalLMOfFloat,  # MllamaForCausalLM of 5.23
    "189c4b340361c46a": causal_lm.CausalLMOfFloat,  # of 4.57 and 5.0
    "1dff45b7a0ab64b8": causal_lm.MoeCausalLM,  # MixtralForCausalLM
    "4a503be17ccd1ad2": causal_lm.MoeOfTextCausalLM,  # Qwen3VLMoeForConditionalGeneration
    "ad4844e68163c0ab": causal_lm.MoeOfTextCausalLM,  # Glm4vMoeForConditionalGeneration
    "c22b5fbbdfdc9573": causal_lm.SoftcappedCausalLM,  # Gemma2ForCausalLM
    "8573b2c9e65ae139": causal_lm.SoftcappedCausalLM,  # PaliGemmaForConditionalGeneration of 5.21 on
    "3f440530c0fd0e92": causal_lm.SoftcappedCausalLM,  # Gemma4ForCausalLM
    "8c9618da0f7c2055": causal_lm.SoftcappedCausalLM,  # Gemma4ForConditionalGeneration
    "fff64a902b89006c": causal_lm.DividedCausalLM,  # GraniteForCausalLM
    "3955b7c698a2918b": causal_lm.MultipliedCausalLM,  # CohereForCausalLM
    "8991d921548cfd06": causal_lm.MultipliedByModelCausalLM,  # FalconH1ForCausalLM of 5.23
    "474db812108fa665": causal_lm.MultipliedByModelCausalLM,  # of 4.57 and 5.0
    "6d15bfe2a8cefc69": family_heads.GraniteMoeCausalLM,  # GraniteMoeForCausalLM
    "6d7f7f4b9c5cad3c": family_heads.MambaCausalLM,  # MambaForCausalLM
    "eb666e8beae295b9": causal_lm.RoutedCausalLM,  # AfmoeForCausalLM
    "34dbaeac674168ec": family_heads.BambaCausalLM,  # BambaForCausalLM
    "323ca586b4fda59a": family_heads.BeamCausalLM,  # BeamForCausalLM
    "1bbc8b2fd73d7ca6": family_heads.CastCausalLM,  # HYV4ForCausalLM
    "778e4b8eef83936b": causal_lm.CausalLM,  # HYV3ForCausalLM, which returns an aux_loss that is None
    "9d7d17ebef0e0150": family_heads.HyperCLOVAXCausalLM,  # HyperCLOVAXForCausalLM
    "3ecacff0fb3f3991": family_heads.JetMoeCausalLM,  # JetMoeForCausalLM
    "6962265ec7b47b52": family_heads.MiniCPM3CausalLM,  # MiniCPM3ForCausalLM
    "bbc5c7ff88b5a6db": causal_lm.SoftcappedCausalLM,  # MistralLarge4ForConditionalGeneration
    "4112bab4d1bbac5a": family_heads.RecurrentGemmaCausalLM,  # RecurrentGemmaForCausalLM
    "f9d7edc42aa5e1cc": causal_lm.CausalLM,  # OPTForCausalLM, whose logits are made contiguous
    "c2c7fd2ce9f00e44": causal_lm.CausalLMInside,  # Llama4ForConditionalGeneration of 5.23
}

LAYERS = {
    "e3b0c44298fc1c14": decoder.DecoderLayer,  # no difference
    "8702bd01918e7ce4": decoder.SandwichLayer,  # Gemma2DecoderLayer of 4.53 to 4.56 and of 5.0 on
    "502430feb4f77262": decoder.SandwichLayer,  # of 4.57
    "3d1bcef31599620f": decoder.Glm4Layer,  # of all supported versions
    "95741f3e291ba554": decoder.ScaledLayer,  # GraniteDecoderLayer, but for 4.57 and 5.0
    "53ab13df176a3976": decoder.ScaledLayer,  # of these
    "7d9d354cfcae8f63": decoder.DropoutLayer,  # Phi3DecoderLayer of 4.57 on
    "337b64fde9c2ee06": decoder.DecoderLayer,  # GptOssDecoderLayer of 4.57 on, whose MLP returns a tuple
    "b23b8652668c11f5": decoder.DecoderLayer,  # MllamaSelfAttentionDecoderLayer of 4.57 on
    "8ab29f0069a3c2c6": decoder.Llama4Layer,  # Llama4TextDecoderLayer of 4.57 on
    "b444d18588c2c619": decoder.Gemma4Layer,  # Gemma4TextDecoderLayer of 5.23
    "30097b5c3b51517c": decoder.Gemma4Layer,  # Gemma4UnifiedTextDecoderLayer of 5.23
    "054ccdd4e61fbf4a": family_layers.AfmoeLayer,  # AfmoeDecoderLayer
    "bf15778601077b60": family_layers.ApertusLayer,  # ApertusDecoderLayer
    "ee1e24066cf03b04": family_layers.BambaLayer,  # BambaDecoderLayer
    "8ad0959c680af205": family_layers.IndexedLayer,  # GlmMoeDsaDecoderLayer, MistralLarge4TextDecoderLayer
    "4a8642408847e76d": family_layers.GraniteMoeLayer,  # GraniteMoeDecoderLayer
    "3915bc063f5392e8": family_layers.GraniteMoeSharedLayer,  # GraniteMoeSharedDecoderLayer, GraniteMoeSWADecoderLayer
    "2b4c3b07509323e4": family_layers.GraniteMoeHybridLayer,  # GraniteMoeHybridDecoderLayer
    "687796d20e3a59cc": family_layers.HyperCLOVAXLayer,  # HyperCLOVAXDecoderLayer
    "7d760d22d87191f1": family_layers.JambaLayer,  # JambaAttentionDecoderLayer
    "0d87c5f884bccb96": family_layers.MiniCPM3Layer,  # MiniCPM3DecoderLayer
    "0f91c775717bae8d": family_layers.VaultGemmaLayer,  # VaultGemmaDecoderLayer
    "480a5c088a0b85ed": decoder.HybridLayer,  # Qwen3NextDecoderLayer of 5.23
    "2670243c1934e08c": decoder.HybridLayer,  # Qwen3_5DecoderLayer of 5.23
}

LEFT_ALONE = {  # in which nothing can be fused
    "9e7c2b713365c52a",  # HYV4UnweightedRMSNorm: a factor, and no norm
    "6913de200383abad",  # Olmo2DecoderLayer: what is added to the residual stream is normalised, and not the sum
    "6a52429b77334fc6",  # CohereDecoderLayer: attention and MLP read the same norm's output, and are added as they are
    "d0c418315450c8bd",  # JambaAttention: no rotary embedding
    "b42eb62f1f4b6739",  # KimiLinearAttention: likewise
    "4ef29add3a4cc650",  # KimiLinearDeltaAttention: likewise
    "4014141a69e0b99e",  # BailingHybridDeltaAttention: likewise
    "6fe2ed86653006fd",  # MiniMaxLightningAttention: likewise
    "4a78bf31359d1e96",  # JetMoeParallelExperts: matmuls
    "71d46f8efa3def07",  # MiniMaxDecoderLayer: the norm's output is the residual stream, and the sum is not
    "afcabd25bec3aac9",  # DeepseekV4DecoderLayer: several residual streams, mixed by matrices
    "d94c22e00ae38f30",  # Glm5NextTextDecoderLayer: likewise
    "014770f4cdf5f34b",  # HYV4DecoderLayer: likewise
    "d20dc31967f765f4",  # Qwen4ExpTextDecoderLayer: likewise
    "0b41299b2e269fa2",  # NemotronDecoderLayer: the sum has no RMSNorm
    "78305e689641703c",  # GptOssMLP of 5.0 on: a router, and experts, which are looked at by themselves
    "4cfe1fd04fd3dd1f",  # before
}
